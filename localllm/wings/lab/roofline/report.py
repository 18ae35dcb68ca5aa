"""The report of a benchmark, as a table and as plain data."""

from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from localllm.speed.formats import FormatRates
from localllm.speed.kept import KeptLimits, KeptSpeed, every_entry, store, this_processor
from localllm.speed.work import Work
from localllm.text import counted, harmless, shortened, table
from localllm.wings.lab.roofline.decode_step import DecodeStep
from localllm.wings.lab.roofline.limits import Limits, MeasuredSpread

GIGA = 1e9
# A larger Spread.deviation between rounds means that the machine was busy.
LARGE_DEVIATION = 0.1
MOST_MODELS = 32  # of each machine and thread count that are stored; the oldest are dropped


@dataclass(frozen=True, slots=True)
class Measure:
    """One measurement: tokens, and their seconds in each round. depth: tokens in the sequence before them.

    work: the work per token; None if unknown.
    """

    name: str
    tokens: int
    depth: int
    seconds: tuple[float, ...]
    work: Work | None

    @property
    def speed(self) -> MeasuredSpread:
        """Tokens per second."""
        return MeasuredSpread.of(self.tokens / seconds for seconds in self.seconds)

    @property
    def read_rate(self) -> float | None:
        """Bytes per second, from the median speed."""
        return None if self.work is None else self.work.read * self.speed.median

    @property
    def compute_rate(self) -> float | None:
        """Operations of matrix products per second, from the median speed."""
        return None if self.work is None else (self.work.int8 + self.work.floats) * self.speed.median

    def of_read(self, limits: Limits | None) -> float | None:
        """Share of the read bandwidth, 0 to 1; more than 1 if the data stays in a cache."""
        return self.read_rate / limits.read.median if limits and self.read_rate is not None else None

    def of_compute(self, limits: Limits | None) -> float | None:
        """Share of the arithmetic limits: the operations' time at the limits, relative to the measured time."""
        if self.work is None or limits is None:
            return None
        least = self.work.int8 / limits.int8.median + self.work.floats / limits.floats.median
        return least * self.speed.median


@dataclass(frozen=True, slots=True)
class ThreadReport:
    """Everything measured with one thread count. limits, steps and rates: native engine only."""

    threads: int
    limits: Limits | None
    measures: tuple[Measure, ...]
    steps: tuple[DecodeStep, ...]
    rates: FormatRates | None = None


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A benchmark of one model, or of the limits alone; then model is "" and there are no measures.

    others_cores: the average number of cores that other programs kept busy during it.
    """

    model: str
    architecture: str
    backend: str
    instruction_set: str
    rounds: int
    others_cores: float
    threads: tuple[ThreadReport, ...]

    @property
    def noisy(self) -> bool:
        """Whether the rounds differ so much that other programs must have interfered."""
        speeds = [measure.speed for report in self.threads for measure in report.measures]
        if not speeds:
            limits = [run.limits for run in self.threads if run.limits]
            speeds = [one for limit in limits for one in (limit.read, limit.int8, limit.floats)]
        return any(speed.deviation > LARGE_DEVIATION for speed in speeds)


def as_data(report: BenchReport) -> dict[str, Any]:
    """Plain data. Rates are in 10^9 bytes or operations per second, shares from 0 to 1; None if unknown."""
    return {
        "model": report.model,
        "architecture": report.architecture,
        "backend": report.backend,
        "instruction_set": report.instruction_set,
        "rounds": report.rounds,
        "other_programs_cores": report.others_cores,
        "runs": [_run_data(run) for run in report.threads],
    }


def _run_data(run: ThreadReport) -> dict[str, Any]:
    limits = run.limits
    return {
        "threads": run.threads,
        "limits": limits
        and {
            "read_gb_s": _in_giga(limits.read),
            "int8_gop_s": _in_giga(limits.int8),
            "f32_gop_s": _in_giga(limits.floats),
        },
        "measures": [
            {
                "measure": measure.name,
                "tokens": measure.tokens,
                "depth": measure.depth,
                "tokens_per_s": asdict(measure.speed),
                "bytes_per_token": measure.work and measure.work.read,
                "operations_per_token": measure.work and measure.work.int8 + measure.work.floats,
                "read_gb_s": measure.read_rate and measure.read_rate / GIGA,
                "gop_s": measure.compute_rate and measure.compute_rate / GIGA,
                "of_read_limit": measure.of_read(limits),
                "of_compute_limit": measure.of_compute(limits),
            }
            for measure in run.measures
        ],
        "decode_steps": [
            {"depth": step.depth, "seconds": step.seconds, "shares": {part: step.share(part) for part in step.parts}}
            for step in run.steps
        ],
        "formats": run.rates and asdict(run.rates),
    }


def _in_giga(spread: MeasuredSpread) -> dict[str, float]:
    return {name: value / GIGA for name, value in asdict(spread).items()}


_HEADINGS = ("threads", "measure", "tok/s", "±", "GB/s", "of read", "GOP/s", "of multiply")


def as_text(report: BenchReport) -> str:
    """The tables, with notes on how to read them."""
    lines = [f"This machine's limits ({report.instruction_set})", ""]
    if rows := [_row(run, measure) for run in report.threads for measure in run.measures]:
        lines = [f"{report.model}: {report.architecture} on {report.backend} ({report.instruction_set})", ""]
        lines += [table([_HEADINGS, *rows], right={0, *range(2, len(_HEADINGS))})]
    for run in report.threads:
        lines += _limits(run)
    for run in report.threads:
        lines += [_step(run.threads, step) for step in run.steps]
        lines += _formats(run)
    lines += ["", f"Medians of {report.rounds} rounds; ± is half the distance between the slowest and the fastest."]
    if rows and any(run.limits for run in report.threads):
        lines.append("Read: weights, keys and values; data in a CPU cache may exceed the limit. GOP: matrix products.")
    lines.append(f"Other programs kept {report.others_cores:.1f} cores busy meanwhile.")
    if report.noisy:
        lines.append("The rounds differ by more than 10 %: close other programs, or use more rounds.")
    return "\n".join(lines) + "\n"


def _row(run: ThreadReport, measure: Measure) -> tuple[str, ...]:
    speed = measure.speed
    return (
        str(run.threads),
        measure.name,
        f"{speed.median:.1f}",
        f"{speed.deviation:.0%}",
        _rate(measure.read_rate),
        _share(measure.of_read(run.limits)),
        _rate(measure.compute_rate),
        _share(measure.of_compute(run.limits)),
    )


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / GIGA:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _limits(run: ThreadReport) -> list[str]:
    if run.limits is None:
        return []
    limits = (
        ("read", run.limits.read, "GB/s"),
        ("int8", run.limits.int8, "GOP/s"),
        ("f32", run.limits.floats, "GOP/s"),
    )
    parts = (f"{what} {one.median / GIGA:.1f} {unit} (±{one.deviation:.0%})" for what, one, unit in limits)
    return [f"limits, {counted(run.threads, 'thread')}: {', '.join(parts)}"]


def _step(threads: int, step: DecodeStep) -> str:
    shares = ", ".join(f"{part} {step.share(part):.1%}" for part in step.parts)
    return f"a token after {step.depth}, {counted(threads, 'thread')}: {step.seconds * 1000:.2f} ms: {shares}"


def _formats(run: ThreadReport) -> list[str]:
    if run.rates is None:
        return []
    rates = (f"{name} {rate / GIGA:.1f} GB/s" for name, rate in run.rates.read.items())
    prompt = (f"{name} {rate / GIGA:.0f} GOP/s" for name, rate in run.rates.compute.items())
    return [f"weights, {counted(run.threads, 'thread')}: {', '.join(rates)}; of a prompt {', '.join(prompt)}"]


def keep(report: BenchReport, name: str, weights: str) -> None:
    """Store a benchmark's results. name: the model's; weights: the type of most of its weights.

    Both are "" if only the limits were measured. Limits replace those of the same thread count; entries of other models
    stay. Raises OSError if the folder cannot be written.
    """
    entries = {(kept.processor, kept.instruction_set, kept.threads): kept for kept in every_entry()}
    for run in report.threads:
        if run.limits is None:
            continue
        key = *this_processor(), run.threads
        models = entries[key].models if key in entries else ()
        if (found := _kept_model(harmless(shortened(name)), weights, run)) is not None:
            others = (model for model in models if (model.name, model.format) != (found.name, found.format))
            models = (*others, found)[-MOST_MODELS:]
        rates = run.limits.read.median, run.limits.int8.median, run.limits.floats.median
        entries[key] = KeptLimits(*key, date.today().isoformat(), *rates, models)
    store(entries.values())


def _kept_model(name: str, weights: str, run: ThreadReport) -> KeptSpeed | None:
    def first(kind: str) -> Measure | None:
        found = (one for one in run.measures if one.name.startswith(kind) and one.work is not None)
        return min(found, key=lambda one: one.depth, default=None)

    decode, prefill = first("decode"), first("prefill")
    if decode is None or decode.work is None or decode.read_rate is None or run.limits is None:
        return None
    share = prefill.of_compute(run.limits) if prefill else None
    int8, floats = (share and share * limit.median for limit in (run.limits.int8, run.limits.floats))
    deviation = max(one.speed.deviation for one in (decode, prefill) if one is not None)
    return KeptSpeed(name, weights, decode.work.read, decode.read_rate, int8, floats, deviation, run.rates)
