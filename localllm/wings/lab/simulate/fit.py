"""Measured step times of a model on this machine: a runner's steps, and what an engine adds to them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.runner import Begin, ComputesAside, Runner
from localllm.errors import RequestError
from localllm.wings.lab.simulate.costs import Curve, StepTimes
from localllm.wings.lab.simulate.machines import Machine
from localllm.wings.lab.simulate.runner import SimulatedVocabulary
from localllm.wings.lab.simulate.shape import StepShape

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 192, 256, 384, 512)
_WANTED = (1, 4, 16, 32)
_DEPTH = 1024
_MANY = 64
_TOKENS = 509  # a prime: made-up prompts repeat late
_TOGETHER, _ENGINE_STEPS = 8, 16
Times = dict[int, list[float]]
"""Seconds of each round, by the rows of the step."""


def measure(
    runner: Runner,
    clock: Callable[[], float],
    rounds: int,
    overhead: float,
    tell: Callable[[str], None],
    largest: int = _ROWS[-1],
) -> StepTimes:
    """Time steps of many sizes in `rounds` rounds, after a warm-up round, and take medians. tell: called with progress.

    overhead: seconds of a step that are neither the runner's nor the engine's. largest: rows of the largest step timed.
    Takes a second to a minute, depending on the model. The runner must be idle; no sequences stay in it. Raises
    RequestError if it is too small.
    """
    info = runner.info
    depth = min(_DEPTH, info.max_context - _MANY, (info.pages_total - 8) * info.page_size // 2 - _MANY)
    most = min(info.max_rows, info.max_context, max(largest, _MANY))
    if depth < 1 or most < _MANY:
        raise RequestError(
            f"Steps cannot be measured with {info.max_rows} rows a step, a context of {info.max_context} and "
            f"{info.pages_total * info.page_size} tokens of memory; {_MANY} rows after others are needed."
        )
    bench = _Steps(runner, clock)
    filled = bench.filled(depth)
    plain: Times = {count: [] for count in _ROWS if count <= most}
    logits: Times = {count: [] for count in _WANTED}
    deep: Times = {1: [], _MANY: []}
    for number in range(rounds + 1):
        tell(f"measuring steps, round {number} of {rounds}")
        for found, sequence, wants in ((plain, None, False), (logits, None, True), (deep, filled, False)):
            for count, times in found.items():
                times.append(bench.seconds(sequence, count, count if wants else 0))
    runner.free_sequence(filled)
    tell("measuring what the engine adds")
    fixed, token = engine_overhead(runner, clock)
    fitted = _fitted(_medians(plain), _medians(logits), _medians(deep), depth)
    return replace(fitted, fixed=overhead + fixed, token=token)


def engine_overhead(runner: Runner, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds that an engine adds to a runner's step: (for any step, for each row whose token is chosen).

    From medians of decoding one sequence and several. No sequences stay in the runner.
    """
    together = min(_TOGETHER, runner.info.max_sequences // 2)
    one, several = _added(runner, clock, 1), _added(runner, clock, together)
    token = max(several - one, 0.0) / max(together - 1, 1)
    return max(one - token, 0.0), token


def _added(runner: Runner, clock: Callable[[], float], sequences: int) -> float:
    """The median time that a decoding step of `sequences` sequences takes outside of the runner."""
    timed = BorrowedRunner(runner, clock)
    engine = Engine(cast("Runner", timed), SimulatedVocabulary(), max_running=sequences, clock=clock)
    streams = [
        engine.submit(GenerationRequest((number + 1, 1), SamplingParams(temperature=0), max_tokens=_ENGINE_STEPS))
        for number in range(sequences)
    ]
    added = []
    worked = True
    while worked:
        began = clock()
        worked = engine.step()
        took = clock() - began
        if timed.rows == (sequences, sequences):  # neither prompts nor drafts
            added.append(took - timed.seconds)
        timed.rows = 0, 0
        for stream in streams:
            stream.poll()
    timed.free_all()
    return statistics.median(added)


def machine_of(times: StepTimes, shape: StepShape, memory: float) -> Machine:
    """A machine from step times: bandwidth from a step of one row, peak from the largest step."""
    rows, seconds = times.products.points[-1]
    bandwidth = shape.read_bytes(1) / (times.products(1) + times.logits(1))
    return Machine("this machine, as measured", bandwidth, rows * shape.row_operations / seconds, memory)


def _medians(times: Times) -> dict[int, float]:
    """Medians without the first round, which warms up."""
    return {rows: statistics.median(found[1:]) for rows, found in times.items()}


def _fitted(plain: dict[int, float], logits: dict[int, float], deep: dict[int, float], depth: int) -> StepTimes:
    """Step times from median seconds by rows: on empty sequences without and with logits, and after `depth` tokens.

    With d stored tokens before it, a step of r rows takes (kv_token + r * lookup) * d longer; two values of r give
    both unknowns. A step of r rows on an empty sequence attends to its own r tokens; their time is subtracted from the
    curve.
    """
    one, many = (max(deep[rows] - plain[rows], 0.0) / depth for rows in (1, _MANY))
    lookup = max(many - one, 0.0) / (_MANY - 1)
    kv_token = max(one - lookup, 0.0)
    products = [
        (float(rows), max(seconds - rows * kv_token - rows * (rows + 1) / 2 * lookup, 1e-9))
        for rows, seconds in plain.items()
    ]
    wanted = [(float(rows), max(seconds - plain[rows], 1e-9)) for rows, seconds in logits.items()]
    return StepTimes(Curve(tuple(products)), Curve(tuple(wanted)), kv_token, lookup)


class _Steps:
    """Single steps of a runner."""

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self._runner, self._clock = runner, clock
        self._next = 0

    def filled(self, depth: int) -> int:
        """A new sequence with `depth` tokens."""
        sequence, most = self._runner.create_sequence(), self._runner.info.max_rows
        for first in range(0, depth, most):
            self._run(sequence, min(most, depth - first), 0)
        return sequence

    def seconds(self, filled: int | None, rows: int, wanted: int) -> float:
        """Time of a step of `rows` rows after a filled sequence; the last `wanted` rows get logits."""
        runner = self._runner
        sequence = (
            runner.create_sequence() if filled is None else runner.fork_sequence(filled, runner.sequence_length(filled))
        )
        began = self._clock()
        self._run(sequence, rows, wanted)
        took = self._clock() - began
        runner.free_sequence(sequence)
        return took

    def _run(self, sequence: int, rows: int, wanted: int) -> None:
        start = self._runner.sequence_length(sequence)
        last: Sequence[int] = range(rows - wanted, rows)
        self._next += rows
        vocabulary = min(_TOKENS, self._runner.info.vocab_size)
        tokens = [(self._next + row * row) % vocabulary for row in range(rows)]
        self._runner.run(tokens, range(start, start + rows), [sequence] * rows, last)


class BorrowedRunner:
    """A runner lent to an engine. free_all frees the sequences that the engine has kept.

    Implements localllm.engine.runner.Runner. seconds: of the latest step. rows: its rows and its rows with logits.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self._runner, self._clock = runner, clock
        self._alive: set[int] = set()
        self.seconds = 0.0
        self.rows = (0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def create_sequence(self, *arguments: Any) -> int:
        self._alive.add(sequence := self._runner.create_sequence(*arguments))
        return sequence

    def fork_sequence(self, source: int, length: int) -> int:
        self._alive.add(sequence := self._runner.fork_sequence(source, length))
        return sequence

    def free_sequence(self, sequence: int) -> None:
        self._alive.discard(sequence)
        self._runner.free_sequence(sequence)

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[Any]:
        began = self._clock()
        return self._timed(began, (len(tokens), len(wanted)), self._runner.run(tokens, positions, sequences, wanted))

    def prepare(self, positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]) -> Begin:
        assert isinstance(self._runner, ComputesAside)
        begin, rows = self._runner.prepare(positions, sequences, wanted), (len(positions), len(wanted))

        def begun(tokens: Sequence[int]) -> Callable[[], NDArray[Any]]:
            began = self._clock()
            logits = begin(tokens)
            return lambda: self._timed(began, rows, logits())

        return begun

    def _timed(self, began: float, rows: tuple[int, int], logits: NDArray[Any]) -> NDArray[Any]:
        self.seconds, self.rows = self._clock() - began, rows
        return logits

    def free_all(self) -> None:
        """Free every sequence that the engine has not freed."""
        for sequence in [*self._alive]:
            self.free_sequence(sequence)
