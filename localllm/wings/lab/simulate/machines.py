"""Machines to simulate: by figures, by name from the table of hardware, or as measured by `localllm bench`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import RequestError
from localllm.files import read_text
from localllm.wings.lab.formulas.hardware import HARDWARE

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine's limits. bandwidth: bytes a second. peak: operations a second, a multiply-add being two.

    memory: bytes for weights, keys and values. overhead: seconds of each step that are neither reading nor arithmetic.
    """

    name: str
    bandwidth: float
    peak: float
    memory: float
    overhead: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.bandwidth / GIGA:.4g} GB/s, {self.peak / GIGA:.4g} GOP/s, {self.memory / GIGA:.3g} GB)"
        )


@dataclass(frozen=True, slots=True)
class Link:
    """The link between devices. bandwidth: bytes a second of each device; latency: seconds of a message."""

    bandwidth: float
    latency: float


def named(
    name: str,
    bandwidth: float | None = None,
    peak: float | None = None,
    memory: float | None = None,
    overhead: float = 0.0,
) -> Machine:
    """A machine of the table in docs/inference.md; given figures replace or complete the table's.

    Raises RequestError if the name fits none or several, or a figure is missing.
    """
    found = [each for each in HARDWARE if each.name.casefold() == name.casefold()]
    found = found or [each for each in HARDWARE if name.casefold() in each.name.casefold()]
    if len(found) != 1:
        known = ", ".join(each.name for each in found or HARDWARE)
        raise RequestError(f"--machine {name!r} names {len(found)} machines. Choose one of: {known}.")
    (machine,) = found
    stated = None if machine.memory_gb is None else machine.memory_gb * GIGA
    return of_figures(
        machine.name, bandwidth or machine.bandwidth, peak or machine.f16_peak, memory or stated, overhead
    )


def of_figures(
    name: str, bandwidth: float | None, peak: float | None, memory: float | None, overhead: float = 0.0
) -> Machine:
    """A machine by its figures. Raises RequestError naming the options of missing ones."""
    figures = {"--bandwidth": bandwidth, "--compute": peak, "--memory": memory}
    missing = [option for option, value in figures.items() if value is None]
    if bandwidth is None or peak is None or memory is None:
        raise RequestError(f"{name} needs {', '.join(missing)}: its maker states no such figure, or none was given.")
    return Machine(name, bandwidth, peak, memory, overhead)


def from_bench(path: Path, memory: float, overhead: float = 0.0) -> Machine:
    """The machine measured in a file of `localllm bench --json`: bandwidth from decoding, peak from prefill.

    Uses the run that reads fastest, at its first depth. Raises RequestError for other files, and for models run by
    llama.cpp, whose work is not counted.
    """
    text = read_text(path, pipes=True)
    try:
        report = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{path}: is not JSON: {error}. Write it with localllm bench MODEL --json.") from error
    rates: list[tuple[float, float]] = []
    match report:
        case {"runs": [*runs]}:
            rates = [found for run in runs if (found := _rates(run)) is not None]
    if not rates:
        raise RequestError(
            f"{path} has no figures of a model on the native engine; write it with localllm bench MODEL --json."
        )
    bandwidth, peak = max(rates)
    return Machine(f"this machine by {path.name}", bandwidth, peak, memory, overhead)


def _rates(run: object) -> tuple[float, float] | None:
    match run:
        case {"measures": [{"gop_s": float(computed)}, *decodes]}:
            reads: Sequence[float] = [
                rate for each in decodes if isinstance(each, dict) and isinstance(rate := each.get("read_gb_s"), float)
            ]
            return (reads[0] * GIGA, computed * GIGA) if reads else None
    return None
