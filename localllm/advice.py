"""How much memory a model would take and how fast it would be on this machine, from its header: nothing is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile
from gpu_offload.devices import Device
from gpu_offload.memory import FileSizes
from localllm.errors import RequestError
from localllm.placement.backends import (
    gpus_here,
    native_kv_types,
    place,
    place_draft,
    place_on_gpus,
    plan_request,
)
from localllm.placement.companions import draft_file, projector_of
from localllm.placement.llama import plan
from localllm.placement.memory import context_limit, context_note, kv_bytes_in_file
from localllm.placement.placement import Placement
from localllm.settings import Settings
from localllm.speed.expected import ExpectedSpeed, expected_speed
from localllm.speed.kept import kept_limits
from localllm.text import human_bytes

# The longest context is rounded down to a multiple of this many tokens.
CONTEXT_STEP = 1024
# Planned if no context is requested and more would fit.
USUAL_CONTEXT = 32768
# More bits per weight than Q8_0 has do not improve answers, and cost memory and speed.
MOST_USEFUL_BITS = 8.5


@dataclass(frozen=True, slots=True)
class Advice:
    """A model's placement, and what it allows."""

    model: str  # its name in the file
    placement: Placement
    here: bool  # on this machine; False for imagined GPUs
    trained_context: int  # tokens
    longest_context: int  # the most tokens that fit, up to trained_context, 0 for none
    measured: bool  # whether this machine has been measured
    expected: ExpectedSpeed | None  # None without measurements, or if they do not apply to the model
    bits: float  # average per weight


def advise(file: ModelFile, settings: Settings, imagined: Sequence[Device] = ()) -> Advice:
    """Place a model on this machine, as a load would, or on imagined GPUs.

    On the native engine without a KV budget (kv_mib), a load takes all free memory for keys and values; the placement
    shown has what the context needs, and a note says the rest. Raises RequestError if the model's heads do not fit the
    KV types, and what place raises.
    """
    room = available_memory()
    with draft_file(settings.draft) as draft:
        try:
            if imagined:
                beside = place_draft(draft, replace(settings, backend="llama"), room, lambda: imagined)
                placed = place_on_gpus(file, settings, "", room, imagined, beside)
            else:
                placed = place(file, settings, room=room, draft=draft)
            if placed.backend == "native":
                placed, longest = _native(file, placed, room, draft)
            else:
                longest = _longest_context(file, imagined or gpus_here(), room, placed)
        except ValueError as error:
            raise RequestError(f"{error}.", remedy="Choose f16 with --kv-type-k and --kv-type-v.") from error
    types = native_kv_types(file, settings.kv_types)
    kept = kept_limits(settings.threads) if placed.backend == "native" else None
    notes = (*file.notes, *placed.notes, *filter(None, [context_note(file, settings.ctx)]))
    return Advice(
        model=file.name,
        placement=replace(placed, notes=notes),
        here=not imagined,
        trained_context=FileSizes(file).trained_context,
        longest_context=longest,
        measured=kept is not None,
        expected=expected_speed(file, kept, types) if kept and not placed.on_disk else None,
        bits=8 * file.weights_bytes / max(file.parameter_count, 1),
    )


def best_of(advices: Sequence[Advice | None]) -> int | None:
    """The index of the quantisation to choose: the best that fits, and of equally good ones the smallest.

    Quality is ranked by bits per weight, up to those of Q8_0. None if none fits; entries that are None are skipped.
    """
    fitting = [(number, one) for number, one in enumerate(advices) if one is not None and one.placement.fits]
    ranked = [(min(advice.bits, MOST_USEFUL_BITS), -advice.bits, -number) for number, advice in fitting]
    return -max(ranked)[2] if ranked else None


def _native(file: ModelFile, loaded: Placement, room: int, draft: ModelFile | None) -> tuple[Placement, int]:
    """The native engine's placement with the settings' context or the longest that fits, and the longest context.

    loaded: the placement that a load takes.
    """
    settings, trained = loaded.settings, FileSizes(file).trained_context
    kv_bytes_in_file(file, native_kv_types(file, settings.kv_types))
    whole = place(file, replace(settings, ctx=None, from_disk=False, backend="native"), room=room, draft=draft)
    tokens = whole.tokens if whole.fits else 0
    longest = trained if tokens >= trained else tokens // CONTEXT_STEP * CONTEXT_STEP
    context = context_limit(file, settings.ctx) or min(longest or CONTEXT_STEP, USUAL_CONTEXT)
    placed, more = loaded, ""
    if settings.kv_mib is None:
        settings = replace(settings, ctx=context, backend="native")
        placed = place(file, settings, room=room, draft=draft, kv_tokens=context)
        if loaded.fits and not loaded.on_disk:
            kv = loaded.uses[0].kv
            more = f"a load may take {human_bytes(kv)} for keys and values, {loaded.tokens:,} tokens: kv_mib limits it"
    types, held = native_kv_types(file, settings.kv_types), min(context, placed.tokens)
    notes = [f"{held} tokens of context with {types[0]} keys and {types[1]} values"]
    if held < context and settings.ctx is not None:
        notes.append(f"the KV budget (kv_mib, {settings.kv_mib:,} MiB) holds fewer than the {context:,} tokens of ctx")
    if table := file.weights_bytes - file.loaded_bytes:
        notes.append(f"{human_bytes(table)} of the weights stay in the file and are read row by row")
    notes += placed.notes
    if more:
        notes.append(more)
    if placed.on_disk and placed.fits:
        longest = context
    use = placed.uses[0]
    if not use.fits:
        missing = -(-(use.needed + use.reserve - use.available) >> 20)
        notes.append(f"main memory lacks {missing:,} MiB: choose a shorter context or a smaller model")
        if not settings.from_disk:
            notes.append("the setting from_disk lets a part of the weights stay on the disk, which is slow")
    return replace(placed, reason=loaded.reason, notes=tuple(notes)), longest


def _longest_context(file: ModelFile, devices: Sequence[Device], room: int, placed: Placement) -> int:
    """The most tokens of context with which a placement fits, by bisection; KV types are those requested, or f16."""
    settings = placed.settings
    request = replace(
        plan_request(file, settings, projector_of(file, settings.mmproj)),
        kv_types=native_kv_types(file, settings.kv_types),
        spare=False,
        draft=placed.draft,
    )

    def fits(tokens: int) -> bool:
        return plan(file, devices, room, replace(request, context_tokens=tokens)).fits

    trained = FileSizes(file).trained_context
    if fits(trained):
        return trained
    low, high = 0, -(-trained // CONTEXT_STEP)  # steps that fit, and steps that do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * CONTEXT_STEP) else (low, middle)
    return low * CONTEXT_STEP
