"""Which runner computes a model. Each backend is imported only when it is chosen."""

from collections.abc import Callable

from gguf_io import ModelFile
from localllm.engine.memory_plan import plan_memory
from localllm.engine.runner import Runner
from localllm.settings import Settings

# llama.cpp allocates its KV cells at once: room for a chat and the prefixes of others.
LLAMA_CELLS = 16384
LLAMA_SEQUENCES = 32


def open_runner(file: ModelFile, settings: Settings, progress: Callable[[str, float], None] | None) -> Runner:
    """Load the weights into the backend that the settings name; "auto" is native.

    Raises OutOfMemoryError before loading where main memory does not suffice.
    """
    if settings.backend == "llama":
        return _open_llama(file, settings)
    return _open_native(file, settings, progress)


def _open_native(file: ModelFile, settings: Settings, progress: Callable[[str, float], None] | None) -> Runner:
    from gpu_offload.memory import kv_bytes_per_token
    from models import NativeRunner

    plan = plan_memory(file.size_bytes, kv_bytes_per_token(file, "f16", "f16"))
    return NativeRunner(file, kv_bytes=plan.kv, threads=settings.threads, progress=progress)


def _open_llama(file: ModelFile, settings: Settings) -> Runner:
    from gpu_offload.memory import kv_bytes_per_token
    from gpu_offload.options import LlamaOptions
    from gpu_offload.runner import LlamaCppRunner

    plan = plan_memory(file.size_bytes, kv_bytes_per_token(file, "f16", "f16"))
    cells = min(plan.kv_tokens, max(LLAMA_CELLS, 2 * (settings.ctx or 0)))
    options = LlamaOptions(context_tokens=cells, max_sequences=LLAMA_SEQUENCES, threads=settings.threads)
    return LlamaCppRunner(file, options)
