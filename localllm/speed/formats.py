"""The rates that a model's matrix products reach in each weight format, and the time of everything else.

Formats differ in dequantization cost: one is memory-bound where another is compute-bound. So the speed of a model that
was never run is computed from its formats, each at the rate that it reached in another model.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpu_kernels.recorded_step import Products

if TYPE_CHECKING:
    from models.native_runner import NativeRunner
    from models.needs import NativeNeeds

_PROMPT, _STEPS = 512, 8


@dataclass(frozen=True, slots=True)
class FormatRates:
    """The rates of one model at one thread count, by weight format.

    read: bytes per second in a decoded token's products. compute: operations per second in a prompt's products. step:
    a decoded token's time outside products, in seconds per operation of the program. row: a prompt token's time outside
    products, in seconds per value of its residual stream in each layer.
    """

    read: dict[str, float] = field(default_factory=dict)
    compute: dict[str, float] = field(default_factory=dict)
    step: float = 0.0
    row: float = 0.0

    def decode_seconds(self, needs: "NativeNeeds") -> float:
        """A decoded token's time at a short context, in seconds. Raises KeyError for a format without a rate."""
        read = _together(needs.row, needs.logits)
        return sum(cost.weight_bytes / self.read[name] for name, cost in read.items()) + needs.operations * self.step

    def prefill_seconds(self, needs: "NativeNeeds", tokens: int) -> float:
        """The time of a prompt of `tokens` tokens, in seconds, with the measured batch size. Raises KeyError."""
        of_row = sum(_operations(cost) / self.compute[name] for name, cost in needs.row.items())
        last = sum(cost.weight_bytes / self.read[name] for name, cost in needs.logits.items())
        return tokens * (of_row + needs.values * self.row) + last


def measure_formats(
    runner: "NativeRunner", needs: "NativeNeeds", rounds: int, clock: Callable[[], float]
) -> FormatRates:
    """Time decoding steps and prompts, in total and by format; returns rates from medians, after a warm-up round."""
    rows = min(_PROMPT, runner.info.max_rows, runner.info.max_context)
    steps: list[tuple[float, dict[str, float]]] = []
    prompts: list[tuple[float, dict[str, float]]] = []
    for number in range(rounds + 1):
        prompt = _timed(runner, rows, clock)
        single = [_timed(runner, 1, clock) for _ in range(_STEPS)]
        if number:
            prompts.append(prompt)
            steps += single
    decode, rest = _medians(steps)
    prefill, rest_of_prompt = _medians(prompts)
    read = _together(needs.row, needs.logits)
    return FormatRates(
        read={name: cost.weight_bytes / decode[name] for name, cost in read.items()},
        compute={name: rows * _operations(cost) / prefill[name] for name, cost in needs.row.items()},
        step=rest / needs.operations,
        row=rest_of_prompt / (rows * needs.values),
    )


def _timed(runner: "NativeRunner", rows: int, clock: Callable[[], float]) -> tuple[float, dict[str, float]]:
    """Seconds for a step that computes the first `rows` tokens of a sequence, and for its products by format."""
    sequence = runner.create_sequence()
    began = clock()
    runner.run([1] * rows, range(rows), [sequence] * rows, [rows - 1])
    took = clock() - began
    seconds = runner.last_step().format_seconds(clock)
    runner.free_sequence(sequence)
    return took, seconds


def _medians(timed: Sequence[tuple[float, dict[str, float]]]) -> tuple[dict[str, float], float]:
    """Median seconds of each format, at least 1 ns, and of the remainder of the step, at least 0."""
    formats = {name: max(statistics.median(parts[name] for _, parts in timed), 1e-9) for name in timed[0][1]}
    return formats, max(0.0, statistics.median(whole for whole, _ in timed) - sum(formats.values()))


def _together(row: Mapping[str, Products], logits: Mapping[str, Products]) -> dict[str, Products]:
    return {name: row.get(name, Products()) + logits.get(name, Products()) for name in {**row, **logits}}


def _operations(cost: Products) -> int:
    return cost.int8_operations + cost.float_operations
