"""How long a step takes, by its rows, the contexts that they attend to, and the number of rows with logits.

The times of a step's parts are added. Matrix products follow a curve over the rows, which can come from a roofline or
from measurements. Attention costs a time for each stored token that a sequence reads, and for each token that each of
its rows attends to.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from localllm.wings.lab.formulas import serving, speed
from localllm.wings.lab.simulate.machines import Link, Machine
from localllm.wings.lab.simulate.shape import StepShape

_MOST_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of rows, interpolated linearly between points of ascending rows.

    0 rows take no time. Below the first point, its time holds; beyond the last, the last line's slope continues.
    """

    points: tuple[tuple[float, float], ...]

    def __call__(self, rows: int) -> float:
        if not rows:
            return 0.0
        if rows <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        at = min(bisect_right([count for count, _ in self.points], rows), len(self.points) - 1)
        (low, below), (high, above) = self.points[at - 1], self.points[at]
        return below + (above - below) * (rows - low) / (high - low)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of a step's parts in seconds.

    products: matrix products by rows, without those of logits. logits: those, by rows with logits. kv_token: for each
    stored token that a sequence of the step reads. lookup: for each token that a row attends to. fixed: of any step.
    token: for each row whose next token is chosen: sampling, text and events.
    """

    products: Curve
    logits: Curve
    kv_token: float = 0.0
    lookup: float = 0.0
    fixed: float = 0.0
    token: float = 0.0

    def seconds(self, parts: Iterable[tuple[int, int]], wanted: int) -> float:
        """Time of a step. parts: (new rows, length including them) of each sequence. wanted: rows with logits."""
        rows, read, looked = 0, 0, 0.0
        for count, length in parts:
            rows += count
            read += length
            looked += count * (2 * length - count + 1) / 2
        times = self.products(rows) + self.logits(wanted) + wanted * self.token
        return self.fixed + times + read * self.kv_token + looked * self.lookup


def roofline(shape: StepShape, machine: Machine) -> StepTimes:
    """The least times that a machine's figures allow: that of reading or that of computing, whichever is larger."""

    def curve(read_once: float, operations: float, experts: float = 0.0) -> Curve:
        knee = speed.critical_batch(machine.peak, machine.bandwidth, 2 * read_once / operations) if operations else 1.0
        counts = {float(2**power) for power in range(_MOST_ROWS.bit_length())} | ({knee} if knee > 1 else set())

        def least(rows: float) -> float:
            read = read_once + experts * shape.experts_share(rows)
            return speed.step_seconds(rows, read, 0.0, operations, machine.peak, machine.bandwidth)

        return Curve(tuple((rows, least(rows)) for rows in sorted(counts)))

    return StepTimes(
        curve(shape.dense_bytes, shape.row_operations, shape.expert_bytes),
        curve(shape.output_bytes, shape.output_operations),
        shape.kv_bytes_per_token / machine.bandwidth,
        shape.lookup_operations / machine.peak,
        machine.overhead,
    )


def shared_by(times: StepTimes, devices: int, shape: StepShape, link: Link) -> StepTimes:
    """The same model on several equal devices with tensor parallelism: a theoretical model, not the engine's.

    Each device computes its part of the products and of attention. After attention and after the feed-forward of each
    layer, the activations of all rows are summed over a ring. Nothing overlaps.
    """

    def share(rows: float, seconds: float) -> tuple[float, float]:
        return rows, serving.tensor_parallel_seconds(
            seconds, devices, shape.layers, rows, shape.embedding, link.bandwidth, link.latency
        )

    products = Curve(tuple(share(rows, seconds) for rows, seconds in times.products.points))
    logits = Curve(tuple((rows, seconds / devices) for rows, seconds in times.logits.points))
    return replace(
        times, products=products, logits=logits, kv_token=times.kv_token / devices, lookup=times.lookup / devices
    )


def scaled(times: StepTimes, factor: float) -> StepTimes:
    """The same steps, each `factor` times as long."""
    return made_of(lambda seconds: factor * seconds, times)


def made_of(figure: Callable[..., float], *measured: StepTimes) -> StepTimes:
    """Step times with `figure` applied to each figure of the measured ones, which have the same step sizes."""

    def curve(name: str) -> Curve:
        points = zip(*(getattr(times, name).points for times in measured), strict=True)
        return Curve(tuple((same[0][0], figure(*(seconds for _, seconds in same))) for same in points))

    names = ("kv_token", "lookup", "fixed", "token")
    rest = (figure(*(getattr(times, name) for times in measured)) for name in names)
    return StepTimes(curve("products"), curve("logits"), *rest)
