"""How much memory a model would take and how fast it would be on this machine, from its header: nothing is loaded."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile
from gpu_offload.devices import Device, gpus
from gpu_offload.errors import LlamaCppMissingError
from gpu_offload.memory import ModelNeeds
from gpu_offload.options import LlamaOptions
from gpu_offload.planner import MemoryUse, Plan, PlanRequest
from gpu_offload.planner import plan as make_plan
from localllm.engine.backends import BackendChoice, choose_backend, native_kv_types, plan_request
from localllm.engine.companions import draft_beside, draft_file, native_drafts, projector_of
from localllm.engine.loaded_model import draft_bytes
from localllm.errors import OutOfMemoryError, RequestError
from localllm.memory import (
    RESERVE_BYTES,
    context_limit,
    context_note,
    disk_notes,
    kv_bytes_in_file,
    native_memory,
    plan_from_disk,
    plan_memory,
)
from localllm.roofline.expected import ExpectedSpeed, expected_speed
from localllm.roofline.kept import kept_limits
from localllm.settings import Settings
from localllm.text import human_bytes

# The longest context is rounded down to a multiple of this many tokens.
CONTEXT_STEP = 1024
# Planned if no context is requested and more would fit.
USUAL_CONTEXT = 32768
# More bits per weight than Q8_0 has do not improve answers, and cost memory and speed.
MOST_USEFUL_BITS = 8.5


@dataclass(frozen=True, slots=True)
class Advice:
    """choice: the backend that would run it here, None for imagined GPUs. trained_context: tokens.

    longest_context: the most tokens that fit, up to trained_context, 0 for none. measured: whether this machine has
    been measured. expected: None without measurements, or if they do not apply to the model. bits: average per weight.
    """

    plan: Plan
    choice: BackendChoice | None
    trained_context: int
    longest_context: int
    measured: bool
    expected: ExpectedSpeed | None
    bits: float


def advise(file: ModelFile, settings: Settings, imagined: Sequence[Device] = ()) -> Advice:
    """Plan a model for this machine, or for imagined GPUs.

    Raises RequestError if its heads do not fit the KV types, and what choose_backend raises.
    """
    room = available_memory()
    with draft_file(settings) as draft:
        choice = None if imagined else choose_backend(file, settings, room, draft)  # which makes devices of workers
        native, from_disk = choice is not None and choice.backend == "native", False
        try:
            if native:
                made, longest, from_disk = _native_plan(file, settings, room, draft)
            else:
                request = replace(plan_request(file, settings, projector_of(file, settings)), draft=draft_beside(draft))
                devices = imagined or _gpus_here()
                made = make_plan(file, devices, room, replace(request, dry_run=choice is not None))
                longest = _longest_context(file, devices, room, request)
        except ValueError as error:
            raise RequestError(f"{error}. Choose f16 with --kv-type-k and --kv-type-v.") from error
    kept = kept_limits(settings.threads) if native else None
    return Advice(
        plan=replace(made, notes=(*file.notes, *made.notes, *filter(None, [context_note(file, settings.ctx)]))),
        choice=choice,
        trained_context=ModelNeeds(file).trained_context,
        longest_context=longest,
        measured=kept is not None,
        expected=expected_speed(file, kept, native_kv_types(settings)) if kept and not from_disk else None,
        bits=8 * file.weights_bytes / max(file.parameter_count, 1),
    )


def best_of(advices: Sequence[Advice | None]) -> int | None:
    """The index of the quantisation to choose: the best that fits, and of equally good ones the smallest.

    Quality is ranked by bits per weight, up to those of Q8_0. None if none fits; entries that are None are skipped.
    """
    fitting = [(number, advice) for number, advice in enumerate(advices) if advice is not None and advice.plan.fits]
    ranked = [(min(advice.bits, MOST_USEFUL_BITS), -advice.bits, -number) for number, advice in fitting]
    return -max(ranked)[2] if ranked else None


def _native_plan(file: ModelFile, settings: Settings, room: int, draft: ModelFile | None) -> tuple[Plan, int, bool]:
    """The native engine's plan, for the settings' context or the longest that fits, and the longest context.

    Then whether a part of the weights stays on the disk.
    """
    kv_types, trained = native_kv_types(settings), ModelNeeds(file).trained_context
    kv_bytes_in_file(file, kv_types)
    memory = native_memory(file, kv_types, settings.threads, native_drafts(settings, draft))
    beside, tokens = draft_bytes(draft), 0
    with_draft = replace(memory, weights=memory.weights + beside)
    with suppress(OutOfMemoryError):
        tokens = plan_memory(with_draft, trained, available=room).kv_tokens
    longest = trained if tokens >= trained else tokens // CONTEXT_STEP * CONTEXT_STEP
    context = context_limit(file, settings.ctx) or min(longest or CONTEXT_STEP, USUAL_CONTEXT)
    kv, compute = memory.kv(context), memory.buffers + context * memory.position_bytes
    use = MemoryUse("main memory", memory.weights, kv, compute, beside, RESERVE_BYTES, room)
    notes = [f"{context} tokens of context with {kv_types[0]} keys and {kv_types[1]} values"]
    if table := file.weights_bytes - file.loaded_bytes:
        notes.append(f"{human_bytes(table)} of the weights stay in the file and are read row by row")
    from_disk = not use.fits and settings.from_disk
    if from_disk:
        with suppress(OutOfMemoryError):  # then it does not fit
            disk = plan_from_disk(with_draft, context, kv, room)
            use = MemoryUse("main memory", disk.weights, kv, compute, 0, RESERVE_BYTES, room)
            notes += disk_notes(file, disk)
            longest = context
    if not use.fits:
        missing = -(-(use.needed + use.reserve - use.available) >> 20)
        notes.append(f"main memory lacks {missing:,} MiB: choose a shorter context or a smaller model")
        if not from_disk:
            notes.append("the setting from_disk lets a part of the weights stay on the disk, which is slow")
    options = LlamaOptions(context_tokens=context, type_k=kv_types[0], type_v=kv_types[1], threads=settings.threads)
    return (
        Plan(file.name, ModelNeeds(file).layer_count + 1, options, (use,), tuple(notes), measured=True),
        longest,
        from_disk,
    )


def _longest_context(file: ModelFile, devices: Sequence[Device], room: int, request: PlanRequest) -> int:
    """The most tokens of context with which a plan fits, by bisection; the KV types are those requested, or f16."""
    types = request.kv_types[0] or "f16", request.kv_types[1] or "f16"
    request = replace(request, spare=False, dry_run=False, kv_types=types)

    def fits(tokens: int) -> bool:
        return make_plan(file, devices, room, replace(request, context_tokens=tokens)).fits

    trained = ModelNeeds(file).trained_context
    if fits(trained):
        return trained
    low, high = 0, -(-trained // CONTEXT_STEP)  # steps that fit, and steps that do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * CONTEXT_STEP) else (low, middle)
    return low * CONTEXT_STEP


def _gpus_here() -> list[Device]:
    """This machine's GPUs according to llama.cpp; none without the llama extra, which is needed to use them."""
    try:
        return gpus()
    except LlamaCppMissingError:
        return []
