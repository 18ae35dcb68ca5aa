"""The checks of `localllm doctor`: each says what it found, and what to do if that is not good."""

import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import httpx2
import psutil

from cpu_kernels.cores import usable_cores
from cpu_kernels.isa import ISA, Isa
from cpu_kernels.kernel_cache import SUFFIX, cache_directories, cache_root, portable_kernels
from cpu_kernels.limits import available_memory
from cpu_kernels.tuning import prefetch
from gpu_offload.builds import processor_command
from gpu_offload.devices import gpus
from gpu_offload.errors import LlamaCppMissingError
from gpu_offload.found_gpus import found_gpus
from localllm.engine.disk_cache import disk_cache_folder
from localllm.errors import SettingsError, reason
from localllm.files import listed
from localllm.library import places
from localllm.library.hub import endpoint
from localllm.library.lookup import users_models
from localllm.library.names import OLLAMA_HOST
from localllm.library.own_store import free_bytes
from localllm.packed import packed_folder
from localllm.settings import config_path, load_settings, sessions_path
from localllm.speed.kept import all_kept
from localllm.stored import size_of

LITTLE_MEMORY_BYTES = 2 << 30
LITTLE_DISK_BYTES = 5 << 30
NETWORK_TIMEOUT_S = 5.0


class State(StrEnum):
    """GOOD: nothing to do. ADVICE: it works but could be better. BAD: something will fail."""

    GOOD = "good"
    ADVICE = "advice"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. advice: what to do, or ""."""

    what: str
    state: State
    found: str
    advice: str = ""


def examine() -> Iterator[Check]:
    """Run all checks in order; the network comes last, because it may take seconds.

    Invalid settings are reported and skipped, so that everything else is still checked.
    """
    errors: list[SettingsError] = []
    settings = load_settings({}, report=errors.append)
    yield check_python()
    yield check_processor()
    yield check_memory()
    yield check_speed()
    yield check_gpu()
    yield from check_written_folders(settings)
    yield check_kernels()
    yield check_settings(errors)
    yield check_disk(places.own_store(settings))
    yield check_unfinished(places.own_store(settings) / "partial")
    yield check_models(settings)
    yield from map(check_model_folder, places.configured_folders(settings))
    for address in (endpoint(), f"https://{OLLAMA_HOST}"):
        yield check_network(address)


def check_python() -> Check:
    """Version and platform, for reports."""
    return Check("Python", State.GOOD, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def check_processor() -> Check:
    """Cores, the instruction set that the kernels are compiled for, and how far ahead they prefetch weights."""
    found = f"{usable_cores()} cores, kernels for {ISA}, weights prefetched {prefetch()}"
    if ISA is Isa.PORTABLE:
        return Check("processor", State.ADVICE, found, "No known instruction set: the CPU engine works, but slowly.")
    return Check("processor", State.GOOD, found)


def check_memory() -> Check:
    """Currently free memory."""
    available = available_memory()
    found = f"{available / 2**30:.1f} GiB free of {psutil.virtual_memory().total / 2**30:.1f} GiB"
    if available < LITTLE_MEMORY_BYTES:
        return Check("memory", State.ADVICE, found, "Only the smallest models fit. Close other programs.")
    return Check("memory", State.GOOD, found)


def check_speed() -> Check:
    """The stored measurements of this machine by thread count. Measures nothing itself."""
    found = [
        f"on {kept.threads} thread{'s' if kept.threads > 1 else ''} {kept.read / 1e9:.1f} GB/s, {kept.int8 / 1e9:,.0f} "
        f"int8 and {kept.floats / 1e9:,.0f} f32 GOP/s ({kept.day}); {len(kept.models)} models measured"
        for kept in all_kept()
    ]
    if not found:
        advice = "localllm bench measures in seconds; then plan, list and the chat tell the speed to expect."
        return Check("speed", State.GOOD, "not measured", advice)
    return Check("speed", State.GOOD, "; ".join(found))


def check_gpu() -> Check:
    """GPUs that llama.cpp can use; and if there are none, GPUs that it could use with another build."""
    why, without = "the installed llama.cpp was not built for it", ""
    try:
        if used := gpus():
            shown = (f"{gpu.description}, {gpu.free_bytes / 2**30:.1f} GiB free ({gpu.backend})" for gpu in used)
            return Check("GPU", State.GOOD, "; ".join(shown))
    except LlamaCppMissingError as error:
        why = f"llama.cpp is not available ({error.reason})"
        without = f"Rarer architectures need llama.cpp: {processor_command()}"
    if idle := found_gpus():
        names = ", ".join(gpu.label for gpu in idle)
        return Check("GPU", State.ADVICE, f"{names} lies idle: {why}", "Run: localllm gpu install")
    return Check("GPU", State.GOOD, f"none; {why}; the CPU engine is used" if without else "none", without)


def check_written_folders(where: places.Places) -> Iterator[Check]:
    """All folders that localllm writes to."""
    other = "Choose another folder with"
    lost = f"No model can be pulled or made. {other} model_store (LOCALLLM_MODEL_STORE)."
    yield check_folder("models", places.own_store(where), lost, State.BAD)
    lost = f"Long prompts are computed again after each start. {other} XDG_CACHE_HOME."
    yield check_folder("KV cache", disk_cache_folder(), lost)
    lost = f"Each load of a model packs its weights again. {other} XDG_CACHE_HOME."
    yield check_folder("packed weights", packed_folder(), lost)
    lost = "Chats are not saved. Use localllm chat --sessions FILE to save them elsewhere."
    yield check_folder("chats", sessions_path().parent, lost)
    lost = f"Each start compiles its kernels again. {other} LOCALLLM_KERNEL_CACHE."
    yield check_folder("kernels", cache_root(), lost)


def check_folder(what: str, folder: Path, otherwise: str, state: State = State.ADVICE) -> Check:
    """Whether a folder can be written or created, and its size. Creates nothing.

    otherwise: what happens if it cannot, and what to do. state: how bad that is.
    """
    nearest = folder
    while not os.path.exists(nearest):
        nearest = nearest.parent
    if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
        return Check(what, state, f"{folder} cannot be written", otherwise)
    return Check(what, State.GOOD, f"{size_of(folder) / 2**20:,.1f} MiB in {folder}")


def check_kernels() -> Check:
    """Whether there are kernels for this processor and version, and whether all of them passed their self-check."""
    if portable := portable_kernels():
        advice = "They are slow. Please report it with this processor's name; --backend llama may be faster."
        found = f"portable builds of {', '.join(portable)}: compiled for this processor, they were wrong or crashed"
        return Check("compiled kernels", State.BAD, found, advice)
    count = sum(path.name.endswith(SUFFIX) for folder in cache_directories() for path in listed(folder))
    advice = "" if count else "The first answer takes longer, once, while the kernels for its model are compiled."
    return Check("compiled kernels", State.GOOD, f"{count} for this processor and version" if count else "none", advice)


def check_settings(errors: Sequence[SettingsError]) -> Check:
    """The settings file, which need not exist, and what is invalid in it or in environment variables."""
    path = config_path()
    if errors:
        return Check(
            "settings", State.BAD, " ".join(map(str, errors)), "Other commands refuse to run until it is fixed."
        )
    return Check("settings", State.GOOD, str(path) if os.path.isfile(path) else f"the defaults; there is no {path}")


def check_disk(folder: Path) -> Check:
    """Free space where models are stored."""
    free = free_bytes(folder)
    found = f"{free / 2**30:.1f} GiB free for models"
    if free < LITTLE_DISK_BYTES:
        return Check("disk", State.ADVICE, found, "Free some space, or choose another folder with model_store.")
    return Check("disk", State.GOOD, found)


def check_unfinished(partial: Path) -> Check:
    """Leftovers of interrupted pulls."""
    size = size_of(partial)
    if size:
        advice = "Pull again to resume, or remove them: localllm rm --unfinished."
        return Check("unfinished pulls", State.ADVICE, f"{size / 2**20:,.1f} MiB", advice)
    return Check("unfinished pulls", State.GOOD, "none")


def check_models(where: places.Places) -> Check:
    """The user's models by source."""
    counts = Counter(str(model.source) for model in users_models(where))
    if not counts:
        advice = "There is the built-in one; localllm pull qwen3:0.6b downloads a useful one."
        return Check("models found", State.ADVICE, "none", advice)
    return Check("models found", State.GOOD, ", ".join(f"{count} of {source}" for source, count in counts.items()))


def check_model_folder(folder: Path) -> Check:
    """Whether a folder of the setting model_folders exists."""
    if os.path.isdir(folder):
        errors: list[OSError] = []
        listed(folder, errors.append)
        if not errors:
            return Check("model folder", State.GOOD, str(folder))
        found = f"{folder} cannot be read: {errors[0].strerror}"
        return Check(
            "model folder", State.ADVICE, found, "Allow reading it, or take it out of the setting model_folders."
        )
    return Check("model folder", State.ADVICE, f"{folder} is not there", "Check the setting model_folders.")


def check_network(address: str) -> Check:
    """Whether a host answers at all."""
    try:
        httpx2.head(address, timeout=NETWORK_TIMEOUT_S)
    except (httpx2.TransportError, httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        advice = "Models on this machine still work. Check the network, or the proxy's variables."
        return Check("network", State.ADVICE, f"{address} does not answer: {reason(error)}", advice)
    return Check("network", State.GOOD, f"{address} answers")
