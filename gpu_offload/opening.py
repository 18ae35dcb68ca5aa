"""Plan, load, and where a GPU turns out to have less room than it said, plan again for less."""

import logging
from dataclasses import replace

from cpu_kernels.limits import available_memory
from gguf_io.model_file import ModelFile
from gpu_offload.devices import gpus
from gpu_offload.errors import LlamaCppMemoryError
from gpu_offload.loading import LoadProgress
from gpu_offload.placement import Gpu
from gpu_offload.planner import Plan, PlanRequest, plan
from gpu_offload.runner import LlamaCppRunner

logger = logging.getLogger("localllm.gpu_offload")

_ATTEMPTS = 4
_STEP = 768 * 2**20  # bytes of further reserve a GPU and attempt


def open_planned(
    model: ModelFile, request: PlanRequest, progress: LoadProgress | None = None, main_memory: int | None = None
) -> tuple[LlamaCppRunner, Plan]:
    """Return a runner on this machine's devices and the plan that it follows.

    When a GPU runs out of memory all the same, less is planned for it, a warning is logged, and the plan's notes say
    so; after four attempts, or where nothing lies on a GPU, the error is raised. progress is called on this thread;
    what it raises ends the load. main_memory: bytes to plan with; None asks the machine. Raises LlamaCppError, its kin,
    and what plan() raises.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        found = [Gpu(gpu.description or gpu.name, gpu.total_bytes, gpu.free_bytes) for gpu in gpus()]
        room = available_memory() if main_memory is None else main_memory
        chosen = plan(model, found, room, request)
        try:
            return LlamaCppRunner(model, chosen.options, progress), _told(chosen, attempt)
        except LlamaCppMemoryError as error:
            if attempt == _ATTEMPTS or not chosen.device_bytes:
                raise
            logger.warning("%s\nTrying again with less on the GPU.", error)
            request = replace(request, gpu_layers=None, reserve_bytes=request.reserve_bytes + _STEP)
    raise AssertionError("the loop returns or raises")


def _told(chosen: Plan, attempt: int) -> Plan:
    """The plan that was followed, saying what it cost to find it."""
    if attempt == 1:
        return chosen
    note = f"a GPU had less memory than it said, so that less was planned for it (attempt {attempt})"
    return replace(chosen, notes=(*chosen.notes, note))
