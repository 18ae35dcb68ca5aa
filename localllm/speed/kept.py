"""Stored benchmarks of this machine, in a small file in the user's data folder, for predicting speeds.

Only `localllm bench` writes the file. The key of an entry is the processor, the instruction set that kernels are
compiled for, and the thread count.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cpu_kernels.cores import processor_name, usable_cores, usable_processors
from cpu_kernels.isa import ISA
from gguf_io.system import make_folder, read_file
from localllm.files import write_whole
from localllm.settings import sessions_path
from localllm.speed.formats import FormatRates

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class KeptSpeed:
    """What a model reached. read: bytes that a decoded token reads. format: the type of most of its weights.

    read_rate: bytes per second in decoding. int8_rate, floats_rate: operations per second in prefill, None if not
    measured. deviation: the largest of its speeds, see Spread. rates: None in entries of older versions.
    """

    name: str
    format: str
    read: float
    read_rate: float
    int8_rate: float | None
    floats_rate: float | None
    deviation: float
    rates: FormatRates | None = None


@dataclass(frozen=True, slots=True)
class KeptLimits:
    """A machine's limits at one thread count. read: bytes per second; int8, floats: operations per second.

    day: the ISO date of the benchmark.
    """

    processor: str
    instruction_set: str
    threads: int
    day: str
    read: float
    int8: float
    floats: float
    models: tuple[KeptSpeed, ...] = ()


def kept_path() -> Path:
    """The file, e.g. ~/.local/share/localllm/speeds.json. It may not exist."""
    return sessions_path().with_name("speeds.json")


def kept_limits(threads: int | None = None) -> KeptLimits | None:
    """The entry for this machine and thread count (None: the default of models); None if there is none."""
    wanted = min(threads or usable_cores(), usable_processors())
    return next((kept for kept in all_kept() if kept.threads == wanted), None)


def this_processor() -> tuple[str, str]:
    """The processor's name and the instruction set, as in entries."""
    return processor_name(), str(ISA)


def all_kept() -> list[KeptLimits]:
    """All entries for this processor with the current instruction set, sorted by thread count."""
    here = this_processor()
    found = (kept for kept in every_entry() if (kept.processor, kept.instruction_set) == here)
    return sorted(found, key=lambda kept: kept.threads)


def store(entries: Iterable[KeptLimits]) -> None:
    """Replace all entries. Raises OSError if the folder cannot be written."""
    path = kept_path()
    make_folder(path.parent)
    write_whole(path, json.dumps({"machines": [asdict(kept) for kept in entries]}, indent=1).encode())


def _read_model(content: dict[str, Any]) -> KeptSpeed:
    rates = content.get("rates")
    return KeptSpeed(**{**content, "rates": FormatRates(**rates) if rates else None})


def every_entry() -> Iterator[KeptLimits]:
    """All entries, including those of other machines. Logs a warning and yields none if the file cannot be read."""
    path = kept_path()
    try:
        content = json.loads(read_file(path, MOST_BYTES))
        entries = [
            replace(KeptLimits(**entry), models=tuple(map(_read_model, entry["models"])))
            for entry in content["machines"]
        ]
        stored = [model.rates for entry in entries for model in entry.models if model.rates]
        rates = [rate for one in stored for rate in (*one.read.values(), *one.compute.values())]
        if not all(min(entry.read, entry.int8, entry.floats) > 0 for entry in entries) or min(rates, default=1) <= 0:
            raise ValueError("a limit is not positive")
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        log.warning("%s cannot be used: %s. `localllm bench` measures again.", path, error)
        return
    yield from entries
