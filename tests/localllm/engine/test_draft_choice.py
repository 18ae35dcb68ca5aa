"""The choice of draft lengths against always drafting as many: the whole engine, in virtual time, with known costs."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import cycle, islice
from types import MappingProxyType

import numpy as np
import pytest

from localllm.engine.drafter import DraftModel, SelfDrafter, Wanted
from localllm.engine.engine import Engine
from localllm.engine.measured import Measured
from localllm.engine.request import GenerationRequest, SamplingParams, TokenEvent
from localllm.engine.sequence import KeySpace, TokenSequence
from localllm.engine.speculation import LookupLength, ModelDraftLength
from localllm.engine.step_costs import StepCosts
from localllm.engine.stream import Completion, GenerationStream, fold
from localllm.wings.lab.simulate.costs import Curve, StepTimes
from localllm.wings.lab.simulate.runner import SimulatedRunner, SimulatedVocabulary, VirtualClock, next_token

NOTHING = Curve(((1.0, 0.0),))


def times(*points: tuple[int, float]) -> StepTimes:
    """Step times in milliseconds by rows."""
    return StepTimes(Curve(tuple((float(rows), ms / 1000) for rows, ms in points)), NOTHING)


# Measured with 1.5B and 0.5B parameters on one thread and on two of AVX2, and on one of AVX512; estimated from steps of
# a Xeon, on one thread and on two; a GPU; few rows at the price of one.
MACHINES = {
    "one thread": (
        times((1, 48), (2, 75), (3, 97), (4, 117), (5, 140), (8, 190), (16, 280), (64, 800)),
        times((1, 17), (2, 24), (4, 36), (16, 70), (64, 260)),
    ),
    "two threads": (
        times((1, 30), (2, 40), (3, 47), (4, 53), (5, 80), (8, 104), (16, 160), (64, 420)),
        times((1, 10), (2, 13), (4, 18), (16, 40), (64, 140)),
    ),
    "cheap rows": (
        times((1, 48), (2, 49), (3, 50), (4, 52), (5, 60), (8, 96), (16, 190), (64, 800)),
        times((1, 17), (2, 24), (4, 36), (16, 70), (64, 260)),
    ),
    "AVX512": (
        times((1, 60), (2, 62), (3, 66), (4, 70), (5, 92), (8, 97), (12, 112), (16, 170), (64, 780)),
        times((1, 21), (2, 24), (3, 26.5), (4, 28), (8, 34), (16, 56), (32, 92), (64, 185)),
    ),
    "Xeon": (
        times((1, 78), (2, 87), (3, 93), (4, 98), (5, 120), (8, 140), (12, 170), (16, 250), (64, 900)),
        times((1, 33), (2, 38), (3, 41), (4, 44), (8, 60), (16, 110), (32, 160), (64, 250)),
    ),
    "Xeon, two threads": (
        times((1, 40), (2, 46), (3, 49), (4, 52), (5, 63), (8, 73), (12, 90), (16, 130), (64, 460)),
        times((1, 17), (2, 20), (3, 22), (4, 24), (8, 32), (16, 56), (32, 82), (64, 130)),
    ),
    "GPU": (
        times((1, 4), (4, 4.5), (8, 5), (16, 6), (64, 8), (512, 20)),
        times((1, 1.5), (16, 1.7), (64, 2), (512, 6)),
    ),
}
PROMPT, TOKENS, ANSWERS = 50, 220, 3
# For two answers of Qwen2.5-Coder 1.5B, on code and in prose, at temperatures 0 and 0.7: whether the 0.5B found each
# token the likeliest, having read all before it, and how likely it found its likeliest. A letter's number is twice that
# probability in 32nds, plus 1 for a right token.
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-"
AFTER_WRONG = "1"  # as likely as tokens that the 0.5B drafted after a wrong one
RECORDED = {
    "code, 0": (
        "--t---9----7-g7z-9-3rgn--h-5-77--5---xl9--t---z-----5-------55--ba-3-uIjkj---t1-v--x--o---",
        "9---g---1---l--k9-X--Y9--c5-9--XjSxpU-r9---kil5Xk--l--h--exmk-3n3---97-7a4-----ppxb55f-9-v",
    ),
    "prose, 0": (
        "----x9-T--vIlU0vX9m--9M-g1-Yb-KTsEl5Tlooet7YrOIRPV-Qem1l9--5VllpIglEGfa-Pvk-hnGfre9-bYltS-",
        "XP9i5--n-----3SQzOUEvqbVtIG-KXU15t5fG5Y-nd-OcxhJ-QOXIlaG1I5KNj-N3Szr3zbGhvYhloZ9dc9iWLKYYS",
    ),
    "code, 0.7": (
        "--t---9----7-g7z-9-3rht--3-5-79--9---xm---e-5-7---4-ii-m-g--7xi99-t-------97--p1-9-3-5yr--",
        "prj9-7-l---e-z9v-9--o---p79-j79j-7-jZe-7YSd----j7r1-97---t------1--597-n--h--n--9--d-9zf-9",
    ),
    "prose, 0.7": (
        "----x9-T--vIpUZImoIX7vQ-9ZaM97M-I3i--l3dShqQJa-Yc59KmmWX33-aUkMM7rO0W4izxe5V7ppM7-YZNIbZ-O",
        "XO7e5--l-----3M-9-zpt-GkpH7h5hm-SovjIM9fcRC9qvZU1dIps2-ymrf57zr3V5G-vcid-PV9VfnM1I4pzG5tgI",
    ),
}


class Fixed(ModelDraftLength):
    """Always drafts as many tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def _choose(self, most: int, *_: object) -> int:
        return min(self._count, most)


def played(
    machine: str,
    acceptance: float,
    fixed: int | None = None,
    *,
    alone: bool = False,
    prompt: int = PROMPT,
    clients: int = 1,
) -> tuple[list[float], list[Completion]]:
    """Seconds of decoding of each answer, and all of them. fixed: tokens to draft always. alone: without a draft."""
    clock, (own, draft) = VirtualClock(), MACHINES[machine]
    drafter = None
    if not alone:
        drafter = DraftModel(SimulatedRunner(draft, clock, pages=4096, context=8192, accuracy=acceptance), clock)
        drafter.length = drafter.length if fixed is None else Fixed(fixed)
    runner = SimulatedRunner(own, clock, pages=4096, context=8192)
    engine = Engine(runner, SimulatedVocabulary(), drafter=drafter, clock=clock)
    random, spent, said = np.random.default_rng(1), [], []
    for _ in range(ANSWERS):
        prompts = [tuple(random.integers(1, 16_381, prompt).tolist()) for _ in range(clients)]
        requests = [GenerationRequest(one, SamplingParams(temperature=0), TOKENS) for one in prompts]
        streams = [engine.submit(one) for one in requests]
        while engine.step():
            pass
        done = [stream.collect() for stream in streams]
        spent.append(sum(one.last.timings.decode_s for one in done))
        said += done
    engine.check_integrity()
    return spent, said


@cache
def without(machine: str, prompt: int = PROMPT, clients: int = 1) -> tuple[float, ...]:
    return tuple(played(machine, 1.0, alone=True, prompt=prompt, clients=clients)[0])


@pytest.fixture(autouse=True)
def no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookupLength, "_choose", lambda *_: 0)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.83, 0.95])
@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_cost_at_most_a_fiftieth_and_gain_what_the_best_fixed_length_gains(
    machine: str, acceptance: float
) -> None:
    plain, (own, said) = without(machine), played(machine, acceptance)
    assert all(alone / spent > 0.97 for alone, spent in zip(plain, own, strict=True))
    assert sum(plain) / sum(own) > 0.98
    best = min([sum(plain), *(sum(played(machine, acceptance, count)[0]) for count in (1, 3))])
    assert best / ANSWERS / own[-1] > 0.92, "once its statistics are good"
    for done in said:
        assert all(next_token(token) == after for token, after in zip(done.token_ids, done.token_ids[1:], strict=False))


@pytest.mark.parametrize("acceptance", [0.0, 0.9])
@pytest.mark.parametrize("machine", ["one thread", "cheap rows"])
def test_a_long_prompt_is_read_only_where_it_pays(machine: str, acceptance: float) -> None:
    plain, own = without(machine, 1500), played(machine, acceptance, prompt=1500)[0]
    assert all(alone / spent > 0.97 for alone, spent in zip(plain, own, strict=True))
    if machine == "cheap rows" and acceptance:
        assert plain[-1] / own[-1] > 1.3, "the first answers read the end of the prompt only"


@pytest.mark.parametrize("acceptance", [0.0, 0.95])
def test_a_batch_does_not_lose(acceptance: float) -> None:
    plain, own = without("GPU", PROMPT, 4), played("GPU", acceptance, clients=4)[0]
    assert sum(plain) / sum(own) > (1.2 if acceptance else 0.98)


def test_answers_tell_how_long_drafting_took() -> None:
    for done in played("GPU", 0.95)[1]:
        assert done.last.counts.accepted > 50
        assert 0.0015 * (done.last.counts.drafted - 2) <= done.last.timings.drafting_s < done.last.timings.decode_s
    assert all(done.last.timings.drafting_s == 0 for done in played("GPU", 0.95, alone=True)[1])


def answered(engine: Engine, stream: GenerationStream) -> Completion:
    """The whole answer, computed on this thread. It is read meanwhile: one that nobody reads stops."""
    events: list[TokenEvent] = []
    while engine.step() or not (events and events[-1].finish_reason):
        events += stream.poll()
    return fold(iter(events))


class Layer:
    """A layer that drafts for the runner that it belongs to. The clock moves as it works."""

    def __init__(self, clock: VirtualClock, acceptance: float, token_s: float, reading_s: float) -> None:
        self._clock, self._acceptance, self._token_s, self._reading_s = clock, acceptance, token_s, reading_s
        self._random, self._read = np.random.default_rng(1), False

    def follow(self, wanted: Sequence[tuple[int, int, Sequence[float]]]) -> None:
        if not self._read:
            self._clock.advance(self._reading_s)
        self._read = True

    def draft(self, wanted: Sequence[tuple[int, int, Sequence[float]]]) -> list[list[tuple[int, float]]]:
        drafts = []
        for _, token, least in wanted:
            guess = [token]
            for at, needed in enumerate(least):
                if self._acceptance**at < needed:
                    break
                guess.append(next_token(guess[-1]) if self._random.random() < self._acceptance else 1)
                self._clock.advance(self._token_s)
            drafts.append([(each, self._acceptance) for each in guess[1:]])
        return drafts


@pytest.mark.parametrize(("acceptance", "least"), [(0.0, 0.98), (0.3, 0.98), (0.8, 1.5)])
def test_layers_that_draft_pay_too(acceptance: float, least: float) -> None:
    clock = VirtualClock()
    runner = SimulatedRunner(MACHINES["cheap rows"][0], clock, pages=4096, context=8192)
    drafter = SelfDrafter(Layer(clock, acceptance, 0.003, 0.02), clock)
    engine = Engine(runner, SimulatedVocabulary(), drafter=drafter, clock=clock)
    stream = engine.submit(GenerationRequest(tuple(range(1, 60)), SamplingParams(temperature=0), TOKENS))
    assert 0.048 * (TOKENS - 1) / answered(engine, stream).last.timings.decode_s > least


class Recorded(SimulatedRunner):
    """Guesses as recorded what follows some tokens, and is as sure of it."""

    recorded: Mapping[int, str] = MappingProxyType({})

    def _chance(self, token: int) -> float:
        return (LETTERS.index(self.recorded.get(token, AFTER_WRONG)) // 2 + 0.5) / 32

    def _guess(self, token: int) -> int:
        right = next_token(token)
        return right if LETTERS.index(self.recorded.get(token, AFTER_WRONG)) % 2 else right % 16_000 + 1


def replayed(machine: str, name: str, tokens: int, length: ModelDraftLength | Measured | None) -> list[Completion]:
    """Two answers in which drafted tokens are as right as in a recording, which is repeated where it ends.

    length: a length, or what earlier processes learned; None for no draft model.
    """
    clock, (own, draft) = VirtualClock(), MACHINES[machine]
    token, prompts, recorded = 1, [], {}
    for letters in RECORDED[name]:
        for _ in range(900):
            token = next_token(token)
        prompts.append((*range(1, 45), token))
        after = next_token(token)
        for letter in islice(cycle(letters), tokens):
            recorded[after] = letter
            after = next_token(after)
    drafter = None
    if length is not None:
        runner = Recorded(draft, clock, pages=4096, context=8192)
        runner.recorded = recorded
        drafter = DraftModel(runner, clock)
        if isinstance(length, Measured):
            drafter.recall(length)
        else:
            drafter.length = length
    runner = SimulatedRunner(own, clock, pages=4096, context=8192)
    engine = Engine(runner, SimulatedVocabulary(), drafter=drafter, clock=clock)
    said = []
    for prompt in prompts:
        stream = engine.submit(GenerationRequest(prompt, SamplingParams(temperature=0), tokens))
        said.append(answered(engine, stream))
    engine.check_integrity()
    engine.close()
    return said


class Remembered(Measured):
    """What one process leaves to the next."""

    def __init__(self) -> None:
        super().__init__("draft_costs", "key")
        self._stored = "{}"

    def read(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self._stored)
        return found

    def write(self, measured: Mapping[str, object]) -> None:
        self._stored = json.dumps(measured)


REAL = [
    *((machine, 90) for machine in ("one thread", "two threads", "AVX512", "Xeon", "Xeon, two threads")),
    ("Xeon", 300),
]


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize(("machine", "tokens"), REAL)
def test_answers_of_real_models_lose_little_and_gain_what_the_best_fixed_length_gains(
    machine: str, name: str, tokens: int
) -> None:
    def spent(*learners: ModelDraftLength | Measured | None) -> list[float]:
        return [one.last.timings.decode_s for each in learners for one in replayed(machine, name, tokens, each)]

    plain, kept = spent(None), Remembered()
    first, later = spent(kept), spent(kept)
    assert all(alone / mine > 0.955 for own in (first, later) for alone, mine in zip(plain, own, strict=True))
    best = min(sum(plain), *(sum(spent(Fixed(count))) for count in (1, 2, 3, 4)))
    for own, least in ((first, 0.92), (later, 0.94)):
        assert sum(plain) / sum(own) > 0.975
        assert best / sum(own) > least


def test_where_rows_are_dear_a_guess_that_costs_nothing_shows_it_before_anything_is_read() -> None:
    first = replayed("one thread", "code, 0", 90, ModelDraftLength())[0].last
    assert (first.counts.drafted, first.timings.drafting_s) == (2, 0)


def test_what_was_read_need_not_be_read_again() -> None:
    clock = VirtualClock()
    drafter = DraftModel(SimulatedRunner(MACHINES["AVX512"][1], clock, pages=64, context=512), clock)
    sequence = TokenSequence(range(1, 60), {}, KeySpace())
    reading = drafter.reading_s(sequence)
    assert reading == pytest.approx(0.056)
    assert len(drafter.guess([Wanted(sequence, (0.0, 0.0), 1.0)])[0]) == 2
    assert drafter.reading_s(sequence) == 0
    assert drafter.read_s == pytest.approx(0.177, abs=0.01)


def test_a_draft_ends_where_it_is_no_longer_likely_enough() -> None:
    clock = VirtualClock()
    runner = Recorded(MACHINES["AVX512"][1], clock, pages=64, context=512)
    texts = [[3], [5]]
    for text in texts:
        for _ in range(5):
            text.append(next_token(text[-1]))
    runner.recorded = {
        token: letter
        for text, letters in zip(texts, ("7xxhv", "7hhhh"), strict=True)
        for token, letter in zip(text, letters, strict=False)
    }
    chance = [(LETTERS.index(letter) // 2 + 0.5) / 32 for letter in "7xxhv"]
    drafter = DraftModel(runner, clock)
    sure, unsure = (TokenSequence(text[:1], {}, KeySpace()) for text in texts)
    least = (0.0, 0.9, 0.6, 0.5, 0.6)
    (draft,) = drafter.guess([Wanted(sure, least, 1.0)])
    assert [token for token, _ in draft] == texts[0][1:5], "the fourth is not likely enough for a fifth"
    assert [probability for _, probability in draft] == pytest.approx(chance[:4], abs=1e-4)
    both = drafter.guess([Wanted(sure, least, 1.0), Wanted(unsure, least, 1.0)])
    assert list(map(len, both)) == [3, 2], "a token for one of two must pay for both"


@pytest.mark.parametrize("right", [True, False])
def test_what_is_read_of_an_answer_tells_how_well_the_model_would_have_drafted_it(right: bool) -> None:
    clock = VirtualClock()
    drafter = DraftModel(SimulatedRunner(MACHINES["AVX512"][1], clock, pages=64, context=512, accuracy=0.9), clock)
    sequence = TokenSequence(range(1, 41), {}, KeySpace())
    for _ in range(12):
        sequence.tokens.append(next_token(sequence.tokens[-1]) if right else 7)
    before = drafter.length.chance(0)
    drafter.guess([Wanted(sequence, (0.0,), 1.0)])
    assert drafter.length.chance(0) > before if right else drafter.length.chance(0) < 0.4
    assert drafter.length.learned()["weights"][0] > 10


def test_the_first_token_of_a_draft_may_cost_more_than_the_others() -> None:
    length = Fixed(1)
    clock, (own, draft) = VirtualClock(), MACHINES["AVX512"]
    drafter = DraftModel(SimulatedRunner(draft, clock, pages=4096, context=8192), clock)
    drafter.length = length
    engine = Engine(
        SimulatedRunner(own, clock, pages=4096, context=8192), SimulatedVocabulary(), drafter=drafter, clock=clock
    )
    stream = engine.submit(GenerationRequest((1, 2, 3), SamplingParams(temperature=0), TOKENS))
    assert answered(engine, stream).last.counts.accepted > 100
    assert drafter.token_s == pytest.approx(0.021)
    assert drafter.start_s == pytest.approx(0.003, abs=1e-4), "two rows: the last drafted token, and the one after it"


def learned(plain: float, row: float) -> StepCosts:
    costs = StepCosts()
    for rows in (1, 2, 4, 8, 1):
        costs.observe(rows, plain + row * (rows - 1))
    return costs


def test_nearly_even_drafts_are_tried_until_tens_are_known() -> None:
    length, costs, tried = ModelDraftLength(), learned(0.05, 0.012), 0
    for _ in range(200):
        count = length.choose(15, costs, 0.025)
        tried += count
        if count:
            length.observe([0.4] * count, 0 if tried % 3 else count)
        length.stepped(0.05, 0.002 if count else 0.0)
    assert tried > 20


def test_drafts_that_lose_although_they_should_pay_stop_for_a_while() -> None:
    length, costs = ModelDraftLength(), learned(0.05, 0.0)
    for _ in range(40):
        length.observe([0.99] * 4, 4)
    assert length.choose(15, costs, 0.0) > 2
    for _ in range(10):
        length.stepped(0.05, 0.03)
    assert length.choose(15, costs, 0.0) == 0
    for _ in range(100):
        length.stepped(0.05, 0.0)
    assert length.choose(15, costs, 0.0) > 0


def test_a_step_without_drafts_is_measured_now_and_then() -> None:
    length, costs = ModelDraftLength(), learned(0.05, 0.0)
    for _ in range(StepCosts.OLD * 2):
        costs.observe(4, 0.05)
    assert length.choose(15, costs, 0.0) == 0
    costs.observe(1, 0.05)
    assert length.choose(15, costs, 0.0) > 0


def test_costs_beyond_the_measured_ones_follow_the_last_slope() -> None:
    costs = StepCosts()
    for rows, seconds in ((1, 1.0), (2, 1.6), (4, 2.8)):
        costs.observe(rows, seconds)
    assert costs.remembered(8) == pytest.approx(5.2)
    assert costs.largest == 4
