"""Which runner computes a model. Each backend is imported only when it is chosen."""

from collections.abc import Callable

from gguf_io import ModelFile
from localllm.engine.memory_plan import plan_memory
from localllm.engine.runner import Runner
from localllm.settings import Backend, Settings

# Handles for running requests and for the prefixes of past ones.
LLAMA_SEQUENCES = 32


def open_runner(file: ModelFile, settings: Settings, progress: Callable[[str, float], None] | None) -> Runner:
    """Load the weights into the backend that the settings name.

    Raises OutOfMemoryError, or LlamaCppMemoryError, where memory does not suffice.
    """
    backend = choose_backend(file, settings)
    return _open_llama(file, settings) if backend == "llama" else _open_native(file, settings, progress)


def choose_backend(file: ModelFile, settings: Settings) -> Backend:
    """The backend that the settings name; for "auto", llama.cpp for GPUs and what the native engine does not know.

    Raises UnsupportedModelError where the native engine is left with an architecture that it does not know.
    """
    from models.registry import find_architecture

    backend = _automatic(file) if settings.backend == "auto" else settings.backend
    if backend == "native":
        find_architecture(file.architecture)
    return backend


def _automatic(file: ModelFile) -> Backend:
    from gpu_offload.devices import gpus
    from gpu_offload.errors import LlamaCppMissingError
    from models.registry import ARCHITECTURES

    try:
        return "llama" if gpus() or file.architecture not in ARCHITECTURES else "native"
    except LlamaCppMissingError:
        return "native"


def _open_native(file: ModelFile, settings: Settings, progress: Callable[[str, float], None] | None) -> Runner:
    from gpu_offload.memory import kv_bytes_per_token
    from models import NativeRunner

    budget = None if settings.kv_mib is None else settings.kv_mib * 2**20
    plan = plan_memory(file.size_bytes, kv_bytes_per_token(file, "f16", "f16"), budget)
    return NativeRunner(file, kv_bytes=plan.kv, threads=settings.threads, context=settings.ctx, progress=progress)


def _open_llama(file: ModelFile, settings: Settings) -> Runner:
    from gpu_offload.opening import open_planned
    from gpu_offload.options import LlamaOptions
    from gpu_offload.planner import PlanRequest

    base = LlamaOptions(max_sequences=LLAMA_SEQUENCES, threads=settings.threads)
    # llama.cpp allocates its cells at once: twice the limit holds a chat and the prefixes of others.
    cells = None if settings.ctx is None else 2 * settings.ctx
    runner, _ = open_planned(file, PlanRequest(context_tokens=cells, base=base))
    return runner
