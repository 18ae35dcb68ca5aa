"""Plans and loads; if a GPU has less memory than it reported, plans again with less."""

import logging
from dataclasses import replace

from cpu_kernels.limits import available_memory
from gguf_io.model_file import ModelFile
from gpu_offload.devices import gpus
from gpu_offload.errors import LlamaCppMemoryError
from gpu_offload.loading import LoadProgress
from gpu_offload.planner import Plan, PlanRequest, plan
from gpu_offload.runner import LlamaCppRunner

logger = logging.getLogger("localllm.gpu_offload")

_ATTEMPTS = 4
_STEP = 768 * 2**20  # additional bytes kept free on every GPU, per attempt


def open_planned(
    model: ModelFile, request: PlanRequest, progress: LoadProgress | None = None, main_memory: int | None = None
) -> tuple[LlamaCppRunner, Plan]:
    """Return a runner on this machine's devices and the plan that it follows.

    If a GPU runs out of memory, less is planned for it, a warning is logged, and the plan's notes say so; after four
    attempts, or if nothing is on a GPU, the error is raised. progress is called on this thread; an exception in it ends
    the load. main_memory: bytes to plan with; None means what is available. Raises LlamaCppError, its subclasses, and
    what plan() raises.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        room = available_memory() if main_memory is None else main_memory
        chosen = plan(model, gpus(), room, replace(request, dry_run=True))
        try:
            runner = LlamaCppRunner(model, chosen.options, progress)
        except LlamaCppMemoryError as error:
            if attempt == _ATTEMPTS or not chosen.device_bytes:
                raise
            logger.warning("%s\nTrying again with less on the GPU.", error)
            request = replace(request, gpu_layers=None, reserve_bytes=request.reserve_bytes + _STEP)
            continue
        if attempt == 1:
            return runner, chosen
        note = f"a GPU had less memory than it reported, so less was planned for it (attempt {attempt})"
        return runner, replace(chosen, notes=(*chosen.notes, note))
    raise AssertionError("the loop returns or raises")
