"""Simulations whose figures follow by hand from the cost model."""

import random
from dataclasses import replace

import pytest

from localllm.engine.scheduler import Plan, Scheduler
from localllm.errors import RequestError
from localllm.wings.lab.formulas import serving, speed
from localllm.wings.lab.latency import Outcome
from localllm.wings.lab.loadtest.trial import ClosedLoop, OpenLoop
from localllm.wings.lab.simulate.costs import Curve, StepTimes, made_of, roofline, shared_by
from localllm.wings.lab.simulate.experiments import EXPERIMENTS, SimulatedServer, as_text
from localllm.wings.lab.simulate.fit import engine_overhead, measure
from localllm.wings.lab.simulate.machines import Link, Machine, named
from localllm.wings.lab.simulate.runner import PAGE, SimulatedRunner, SimulatedVocabulary, VirtualClock, next_token
from localllm.wings.lab.simulate.shape import StepShape, llama_3_8b
from localllm.wings.lab.simulate.simulation import Batching, Setup, Simulated, SimulatedDraft, simulate
from localllm.wings.lab.workload.requests import Block, WorkloadRequest
from tests.fakes.fake_runner import FakeRunner

# A step takes 9 ms and 1 ms per row, 2 ms for logits, and 10 us for each stored token that a sequence reads.
TIMES = StepTimes(Curve(((1, 0.010), (1001, 1.010))), Curve(((1, 0.002),)), kv_token=1e-5)
SETUP = Setup(TIMES, pages=1000, context=4096)
AT_ONCE = replace(SETUP, chunked_prefill=False)


def request(name: str, prompt: int, answer: int, at: float = 0.0, shared: int = 0) -> WorkloadRequest:
    prefix = (Block("shared", shared),) if shared else ()
    return WorkloadRequest(at, (*prefix, Block(name, prompt - shared)), answer)


def play(setup: Setup, *requests: WorkloadRequest) -> Simulated:
    return simulate(setup, requests, OpenLoop(None), "seed")


def by_due(played: Simulated) -> list[Outcome]:
    return sorted(played.outcomes, key=lambda outcome: (outcome.due, outcome.ended))


def test_one_request_alone() -> None:
    (alone,) = play(AT_ONCE, request("a", 100, 5)).outcomes
    # The prompt in one step: 9 + 100 ms, 2 ms of logits, 100 tokens read.
    assert alone.ttft == pytest.approx(0.009 + 0.100 + 0.002 + 100e-5)
    # Four more steps of one row, which read 101, 102, 103 and 104 tokens.
    assert alone.itl == pytest.approx([0.012 + length * 1e-5 for length in (101, 102, 103, 104)])
    assert alone.tpot == pytest.approx(0.012 + 102.5e-5)
    assert (alone.prompt_tokens, alone.cached_tokens, alone.generated_tokens) == (100, 0, 5)


def test_a_server_knows_how_long_its_steps_take() -> None:
    (alone,) = play(SETUP, request("a", 400, 1)).outcomes
    # 400 rows take 0.415 s, 964 a second, of which ChunkSize.ALONE_S allows 212.
    first, second = 0.009 + 0.212 + 212e-5, 0.009 + 0.188 + 0.002 + 400e-5
    assert alone.ttft == pytest.approx(first + second)


def test_what_a_request_takes_outside_of_the_engine() -> None:
    setup = replace(AT_ONCE, travel=0.5)
    (alone,) = play(setup, request("a", 100, 2, at=1.0)).outcomes
    assert (alone.due, alone.ttft) == (1.0, pytest.approx(0.5 + 0.009 + 0.100 + 0.002 + 100e-5))
    first, second = simulate(setup, [request("a", 100, 1), request("b", 100, 1)], ClosedLoop(1), "seed").outcomes
    assert second.due == pytest.approx(first.ended)
    assert second.ended == pytest.approx(2 * first.ended)


def test_chunks_let_others_go_on() -> None:
    requests = [request("short", 16, 40), request("long", 2000, 1, at=0.1)]
    whole, chunked = (max(by_due(play(setup, *requests))[0].itl) for setup in (AT_ONCE, SETUP))
    assert whole > 2.0  # the long prompt's one step
    assert chunked < 0.2  # about ChunkSize.TARGET_S


def test_a_shared_prefix_is_not_computed_again() -> None:
    requests = [request("a", 100, 1, shared=80), request("b", 100, 1, at=1.0, shared=80)]
    _, second = by_due(play(AT_ONCE, *requests))
    assert second.cached_tokens == 80
    assert second.ttft == pytest.approx(0.009 + 0.020 + 0.002 + 100e-5)
    _, again = by_due(play(replace(AT_ONCE, prefix_cache=False), *requests))
    assert again.cached_tokens == 0
    assert again.ttft == pytest.approx(0.009 + 0.100 + 0.002 + 100e-5)


def test_a_full_pool_preempts() -> None:
    # Both fit at first with 4 pages each, but need 8 each in the end.
    requests = [request("a", 64, 64), request("b", 64, 64)]
    roomy, tight = play(AT_ONCE, *requests), play(replace(AT_ONCE, pages=12), *requests)
    assert (roomy.stats.preemptions, roomy.use.kv_peak) == (0, pytest.approx(16 / 1000))
    assert tight.stats.preemptions > 0 and tight.use.kv_peak <= 1
    assert [outcome.tokens for outcome in tight.outcomes] == [64, 64]
    first, second = by_due(tight)
    assert second.e2e > first.e2e and tight.seconds > roomy.seconds


def test_batches() -> None:
    requests = [request("a", 16, 2), request("b", 16, 20), request("c", 16, 2, at=0.001)]
    two = replace(AT_ONCE, slots=2)
    ended = {}
    for way in Batching:
        played = by_due(play(replace(two, batching=way), *requests))
        ended[way] = played[-1].ended
        if way is Batching.STATIC:
            assert played[-1].sent == max(outcome.ended for outcome in played[:-1])
    assert ended[Batching.CONTINUOUS] < ended[Batching.STATIC]
    assert play(replace(two, batching=Batching.NONE), *requests).use.rows == 16 * 3 + 1 + 19 + 1


def test_two_at_once_share_a_step() -> None:
    first, second = play(AT_ONCE, request("a", 10, 2), request("b", 10, 2)).outcomes
    assert first.ttft == second.ttft == pytest.approx(0.009 + 0.020 + 0.002 + 20e-5)
    assert first.tpot == second.tpot == pytest.approx(0.009 + 0.002 + 0.002 + 22e-5)


def test_a_closed_loop_waits_for_answers() -> None:
    requests = [request(str(number), 10, 2) for number in range(3)]
    played = simulate(AT_ONCE, requests, ClosedLoop(1), "seed")
    ends = [outcome.ended for outcome in played.outcomes]
    assert [outcome.due for outcome in played.outcomes] == [0.0, *ends[:-1]]
    assert played.busy == pytest.approx(1) and played.queue_peak == 0


def test_a_full_queue_refuses() -> None:
    requests = [request(str(number), 10, 50, at=number / 1000) for number in range(6)]
    played = play(replace(AT_ONCE, slots=1, queue=2), *requests)
    assert sum(outcome.error is not None for outcome in played.outcomes) == 3
    assert played.queue_peak == 2


def test_a_prompt_beyond_the_context_is_refused() -> None:
    (refused,) = play(SETUP, request("a", 5000, 1)).outcomes
    assert refused.error is not None and "4096" in refused.error


def test_a_perfect_draft_model_makes_decoding_faster() -> None:
    draft = SimulatedDraft(StepTimes(Curve(((1, 0.0001),)), Curve(((1, 0.0001),))), 1.0)
    flat = replace(AT_ONCE, times=StepTimes(Curve(((1, 0.010),)), Curve(((1, 0.0),))))
    plain, drafted = (play(setup, request("a", 20, 101)) for setup in (flat, replace(flat, draft=draft)))
    assert plain.outcomes[0].e2e == pytest.approx(101 * 0.010)
    assert drafted.stats.accepted_tokens == drafted.stats.drafted_tokens - 2 > 60, "but for two guesses that measure"
    assert drafted.outcomes[0].e2e < plain.outcomes[0].e2e / 3
    assert drafted.outcomes[0].tokens == 101


def test_drafts_are_right_as_often_as_said() -> None:
    guesses = SimulatedRunner(TIMES, VirtualClock(), pages=300, context=4096, accuracy=0.7)
    sequence, rows = guesses.create_sequence(), 512
    tokens = random.Random(1).choices(range(1, 16_000), k=4096)
    right = 0
    for first in range(0, 4096, rows):
        piece = tokens[first : first + rows]
        logits = guesses.run(piece, range(first, first + rows), [sequence] * rows, range(rows))
        wanted = [next_token(token) for token in piece]
        right += int((logits.argmax(axis=1) == wanted).sum())
    assert right / 4096 == pytest.approx(0.7, abs=0.03)


def test_pages_are_counted_as_a_runner_with_contents_counts_them() -> None:
    dice = random.Random(2)
    ours = SimulatedRunner(TIMES, VirtualClock(), pages=60, context=4096)
    theirs = FakeRunner(pages=60, page_size=PAGE, max_rows=512, max_sequences=1024)
    pairs: list[tuple[int, int]] = []
    for _ in range(600):
        pair = dice.choice(pairs) if pairs else None
        length = ours.sequence_length(pair[0]) if pair else 0
        match dice.randrange(5), pair:
            case 0, _:
                pairs.append((ours.create_sequence(), theirs.create_sequence()))
            case 1, (a, b):
                cut = dice.randint(0, length)
                pairs.append((ours.fork_sequence(a, cut), theirs.fork_sequence(b, cut)))
            case 2, (a, b):
                cut = dice.randint(0, length)
                ours.truncate_sequence(a, cut)
                theirs.truncate_sequence(b, cut)
            case 3, (a, b) if len(pairs) > 3:
                ours.free_sequence(a)
                theirs.free_sequence(b)
                pairs.remove((a, b))
            case _, (a, b):
                count = dice.randint(1, 40)
                assert ours.pages_needed(a, count) == theirs.pages_needed(b, count)
                if ours.pages_needed(a, count) <= ours.pages_free():
                    for runner, handle in ((ours, a), (theirs, b)):
                        runner.run([1] * count, range(length, length + count), [handle] * count, [])
        assert ours.pages_free() == theirs.pages_free()
        ours.check_integrity({a for a, _ in pairs})


def test_the_roofline_is_the_formula() -> None:
    shape, machine = llama_3_8b(), Machine("made up", 1e12, 1e14, 24e9)
    times = roofline(shape, machine)
    for batch, context in ((1, 100), (8, 4096)):
        read = shape.dense_bytes + shape.output_bytes
        kv = shape.kv_bytes_per_token * context
        formula = speed.step_seconds(batch, read, kv, shape.row_operations, machine.peak, machine.bandwidth)
        attention = batch * context * shape.lookup_operations / machine.peak
        assert times.seconds([(1, context)] * batch, batch) == pytest.approx(formula + attention)
    assert times.products(4000) == pytest.approx(speed.prefill_seconds(4000, shape.row_operations, machine.peak))


def test_devices_are_the_formula() -> None:
    shape, machine, link = llama_3_8b(), Machine("made up", 1e12, 1e14, 24e9), Link(25e9, 1e-5)
    alone = roofline(shape, machine)
    shared = shared_by(alone, 4, shape, link)
    for rows in (1, 16, 3000):
        formula = serving.tensor_parallel_seconds(
            alone.products(rows), 4, shape.layers, rows, shape.embedding, link.bandwidth, link.latency
        )
        assert shared.products(rows) == pytest.approx(formula)
    assert shared.kv_token == alone.kv_token / 4


def test_measured_steps_are_those_of_the_runner() -> None:
    clock = VirtualClock()
    truth = replace(TIMES, lookup=3e-6, logits=Curve(((1, 0.002), (512, 0.024))))
    runner = SimulatedRunner(truth, clock, pages=400, context=4096)
    found = measure(runner, clock, 2, 0.0, lambda _: None)
    for parts, wanted in ([(1, 900)], 1), ([(1, 50)] * 8, 8), ([(200, 1500)], 0), ([(300, 300), (1, 70)], 2):
        assert found.seconds(parts, wanted) == pytest.approx(truth.seconds(parts, wanted), rel=0.01)
    runner.check_integrity(set())
    with pytest.raises(RequestError, match="a context of 50"):
        measure(SimulatedRunner(truth, clock, pages=400, context=50), clock, 1, 0.0, lambda _: None)


def test_what_an_engine_adds_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    runner = SimulatedRunner(TIMES, clock, pages=400, context=4096)
    schedule, token_bytes = Scheduler.schedule, SimulatedVocabulary.token_bytes

    def planned(scheduler: Scheduler) -> Plan:
        clock.advance(0.003)
        return schedule(scheduler)

    def spelled(vocabulary: SimulatedVocabulary, token: int) -> bytes:
        clock.advance(0.0005)  # once for each sampled token
        return token_bytes(vocabulary, token)

    monkeypatch.setattr(Scheduler, "schedule", planned)
    monkeypatch.setattr(SimulatedVocabulary, "token_bytes", spelled)
    fixed, token = engine_overhead(runner, clock)
    assert (fixed, token) == (pytest.approx(0.003), pytest.approx(0.0005))
    runner.check_integrity(set())
    times = replace(TIMES, fixed=fixed, token=token)
    assert times.seconds([(1, 100)] * 4, 4) - TIMES.seconds([(1, 100)] * 4, 4) == pytest.approx(0.005)
    assert made_of(lambda one, other: (one + other) / 2, times, TIMES).fixed == pytest.approx(0.0015)


def test_a_model_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(RequestError, match="leaves nothing of 4"):
        llama_3_8b().pages(4e9, PAGE)


def test_machines_by_name() -> None:
    assert named("rtx 4090").bandwidth == 1008e9
    with pytest.raises(RequestError, match="names 4 machines"):
        named("apple")
    with pytest.raises(RequestError, match="Apple M4 needs --compute"):
        named("Apple M4")


def test_keys_and_values_take_what_their_type_takes() -> None:
    shape = llama_3_8b()
    assert shape.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert replace(shape, value_bytes=34 / 32).kv_bytes_per_token == 2 * 32 * 8 * 34 * 4  # 34 bytes for 32 numbers


def test_experts_are_read_as_a_batch_uses_them() -> None:
    shape = replace(llama_3_8b(), dense_bytes=0.0, expert_bytes=1e9, experts=8, experts_used=2)
    times = roofline(shape, Machine("made up", 1e9, 1e15, 24e9))
    assert times.products(1) == pytest.approx(0.25)
    assert times.products(2) == pytest.approx(1 - 0.75**2)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_run(name: str) -> None:
    shape: StepShape = llama_3_8b()
    machine = named("RTX 4090")
    setup = Setup(roofline(shape, machine), shape.pages(machine.memory, PAGE), shape.context)
    finding = EXPERIMENTS[name](SimulatedServer(shape, machine, Link(25e9, 1e-5), setup, "1"))
    assert len(finding.rows) > 3 and {len(row) for row in finding.rows} == {len(finding.rows[0])}
    cells = {head: [row[at] for row in finding.rows[1:]] for at, head in enumerate(finding.rows[0])}
    match name:
        case "baseline":
            waits = [float(wait) for wait in cells["WAIT S"]]
            assert waits == sorted(waits)
        case "batching":
            none, static, continuous = map(float, cells["TIMES"])
            assert none == 1 < static < continuous <= setup.slots
        case "prefix":
            assert all(saved == "-" or float(saved[:-1]) > 70 for saved in cells["TTFT SAVED"])
        case "speculation":
            assert float(cells["FASTER"][3]) > float(cells["FASTER"][1]) > 1
        case "devices":
            assert float(cells["FASTER"][1]) < 2
        case "breaking":
            assert cells["SLO MET"][0] == "100%" and float(cells["SLO MET"][-1][:-1]) < 50
        case "size":
            assert cells["DEVICES NEEDED"] == ["1", "1", "2", "6"]
    assert finding.found in as_text(finding)
