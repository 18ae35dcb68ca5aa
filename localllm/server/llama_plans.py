"""Memory grants for llama.cpp's models and for embedding models: main memory and GPUs, given what others hold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gguf_io import ModelFile
from gpu_offload.devices import Device, gpus
from gpu_offload.errors import LlamaCppMissingError
from gpu_offload.planner import DEFAULT_RESERVE, Plan
from gpu_offload.planner import plan as plan_placement
from localllm.engine.backends import BackendChoice, plan_request
from localllm.engine.companions import projector_of
from localllm.engine.text_encoders import encoder_bytes
from localllm.errors import OutOfMemoryError
from localllm.memory import RESERVE_BYTES
from localllm.settings import Settings

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Grant:
    """settings: place the model so. main: bytes of main memory, KV cache included.

    devices: bytes of each GPU, in llama.cpp's order; empty if none is used.
    """

    settings: Settings
    main: int
    devices: tuple[int, ...] = ()


def plan_model(
    settings: Settings, file: ModelFile, room: int, promised: Sequence[Sequence[int]], others_on_gpus: bool
) -> Grant:
    """Grant memory to a generating model. promised: the GPU grants of each load in progress.

    While other models occupy GPUs, a model that would fit whole without them is not split: the others are unloaded
    first. Raises OutOfMemoryError with the sums.
    """
    found = _gpus(promised)
    request = replace(plan_request(file, settings, projector_of(file, settings)), dry_run=True)
    made = plan_placement(file, found, room, request)
    if not made.uses[0].fits:
        raise _refusal(made, "Close other programs, choose a smaller quantisation, or set the context (ctx) lower.")
    if others_on_gpus and not (made.fits and _is_whole(made, settings)):
        raise _refusal(made, "The GPUs have too little room while the other models are loaded.")
    return Grant(settings, made.uses[0].needed, tuple(use.needed for use in made.uses[1:]))


def plan_embedder(
    settings: Settings, choice: BackendChoice, file: ModelFile, room: int, promised: Sequence[Sequence[int]]
) -> Grant:
    """Grant memory to an embedding model or reranker: with llama.cpp on the GPU with the most room, else main memory.

    Raises OutOfMemoryError with the sums, UnsupportedModelError if the native engine cannot compute the model.
    """
    weights, beside = encoder_bytes(file, choice)
    needed = weights + beside
    found = [] if settings.gpu_layers == 0 or choice.backend == "native" else _gpus(promised)
    if found:
        chosen = max(range(len(found)), key=lambda index: found[index].free_bytes)
        chosen = chosen if settings.main_gpu is None else min(settings.main_gpu, len(found) - 1)
        if needed + DEFAULT_RESERVE <= found[chosen].free_bytes:
            devices = tuple(needed if index == chosen else 0 for index in range(len(found)))
            return Grant(replace(settings, main_gpu=chosen), beside, devices)
    if needed + RESERVE_BYTES > room:
        raise OutOfMemoryError(
            f"The model does not fit into memory: it needs {needed // MIB:,} MiB and {RESERVE_BYTES // MIB} MiB in "
            f"reserve; {max(room, 0) // MIB:,} MiB are available. Close other programs."
        )
    return Grant(settings if choice.backend == "native" else replace(settings, gpu_layers=0), needed)


def _gpus(promised: Sequence[Sequence[int]]) -> list[Device]:
    """The GPUs with their free memory less all promised bytes. What a running load has allocated counts twice."""
    try:
        devices = gpus()
    except LlamaCppMissingError:  # loading reports it
        return []
    found = []
    for index, gpu in enumerate(devices):
        taken = sum(parts[index] for parts in promised if index < len(parts))
        found.append(replace(gpu, free_bytes=max(gpu.free_bytes - taken, 0)))
    return found


def _is_whole(made: Plan, settings: Settings) -> bool:
    """Whether the plan places on GPUs everything that the settings allow there."""
    if settings.gpu_layers is not None:
        return True
    return made.options.gpu_layers == made.layers and (
        settings.n_cpu_moe is not None or made.options.cpu_expert_layers == 0
    )


def _refusal(made: Plan, advice: str) -> OutOfMemoryError:
    table = "\n".join("  ".join(row) for row in made.rows())
    return OutOfMemoryError(f"The model does not fit into memory (MiB):\n{table}\n{advice}")
