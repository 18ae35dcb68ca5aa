"""Chooses the backend of a model, places its bytes and opens its runner. Each backend is imported only when needed."""

import errno
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cpu_kernels.kernel import compile_all
from cpu_kernels.limits import available_memory
from gguf_io import ModelFile, open_model
from gguf_io.runner_info import LoadProgress
from gpu_offload.errors import LlamaCppMemoryError, LlamaCppMissingError
from gpu_offload.library import llama
from gpu_offload.options import LlamaOptions
from localllm.engine.runner import Runner
from localllm.errors import OutOfMemoryError, RequestError
from localllm.placement.companions import (
    for_draft,
    is_head,
    native_drafts,
    open_adapters,
    projector_of,
    refuse_as_model,
    refuse_head_on_llama,
    usual_adapters,
)
from localllm.placement.memory import (
    RESERVE_BYTES,
    context_limit,
    disk_notes,
    kv_bytes_in_file,
    place_from_disk,
    place_in_memory,
    trained_context,
)
from localllm.placement.placement import Placement
from localllm.settings import KVType, Settings
from models.errors import UnsupportedModelError, kernels_needed
from models.registry import ARCHITECTURES, find_architecture
from models.steps import compiling

if TYPE_CHECKING:
    from gpu_offload.devices import Device
    from localllm.placement.llama import LlamaRequest
    from models.native_runner import NativeRunner
    from models.needs import NativeNeeds
    from models.packed_file import PackedWeights

log = logging.getLogger(__name__)
KEPT_KEYS = "keys are stored as q8_0, not q4_0: they have a bias, whose large values four bits would destroy"
_KEY_BIAS = re.compile(r"blk\.\d+\.attn_(k|qkv)\.bias")
LLAMA_SEQUENCES = 32  # handles for running requests and for cached prefixes
DRAFT_KV_MIB = 256  # a draft model's KV cache on the native engine

Gpus = Callable[[], "Sequence[Device]"]

_ATTEMPTS = 4
_STEP = 768 * 2**20  # additional bytes kept free on every GPU, per attempt


def place(
    file: ModelFile,
    settings: Settings,
    *,
    room: int | None = None,
    gpus: "Gpus | None" = None,
    draft: ModelFile | None = None,
    kv_tokens: int | None = None,
    held: int = 0,
) -> Placement:
    """Choose the backend and plan where every byte goes, from headers alone.

    room: bytes of main memory; None is the machine's available memory. gpus: lists GPUs to use with their free memory;
    None for gpus_here. draft: the opened file of the draft setting (draft_file): a draft model is placed before the
    model, a head with it. kv_tokens: plan the native engine's KV memory for this many tokens, instead of its budget
    (kv_mib). held: bytes of main memory that could be freed, so that their lack does not decide the backend.

    A placement that does not fit is returned too: see Placement.checked. Raises what choose_backend raises;
    RequestError if the model's heads do not fit the types of keys and values; DeviceRequestError for missing GPUs.
    """
    if settings.rpc:
        _add_workers(settings.rpc)
    room = available_memory() if room is None else room
    beside = place_draft(draft, settings, room, gpus or gpus_here)
    placed = _chosen(file, settings, room, draft, beside, kv_tokens, held)
    if any(settings.kv_types):  # f16 fits every head
        kv_bytes_in_file(file, native_kv_types(file, settings.kv_types))
    if placed.backend == "llama":
        return place_on_gpus(file, settings, placed.reason, room, (gpus or gpus_here)(), beside, dry_run=True)
    if not placed.uses:
        parts = _native_parts(file, settings, draft)  # raises
        return _placed_natively(file, settings, parts, placed.reason, room, beside, kv_tokens, held)
    return placed


def choose_backend(
    file: ModelFile, settings: Settings, room: int | None = None, draft: ModelFile | None = None
) -> Placement:
    """The backend that place would choose, and why. The arguments are those of place.

    That is the settings' backend; for "auto", llama.cpp if there is a GPU, if the native engine cannot compute the
    model, or if only llama.cpp's plan fits into main memory. First adds workers on other machines as devices. Raises
    UnsupportedModelError if the choice is the native engine and it does not support the architecture; RequestError if
    the settings combine the native engine with options of llama.cpp only, or llama.cpp with a head that drafts; and
    what add_workers raises.
    """
    if settings.rpc:
        _add_workers(settings.rpc)
    room = available_memory() if room is None else room
    return _chosen(file, settings, room, draft, place_draft(draft, settings, room, gpus_here), None, 0)


def _add_workers(rpc: str) -> None:
    from gpu_offload.rpc import add_workers

    if workers := [address.strip() for address in rpc.split(",") if address.strip()]:
        add_workers(workers)


def _chosen(
    file: ModelFile,
    settings: Settings,
    room: int,
    draft: ModelFile | None,
    beside: Placement | None,
    kv_tokens: int | None,
    held: int,
) -> Placement:
    """The backend. The native engine's bytes are placed too, unless its header turns out to be unsupported."""
    refuse_as_model(file)
    chosen = Placement("native", "chosen by the backend setting", settings=settings)
    parts = cache(partial(_native_parts, file, settings, draft))
    if settings.backend == "auto":
        chosen = automatic_choice(settings, partial(_native_lacks, file, parts))
    elif settings.backend == "llama":
        chosen = replace(chosen, backend="llama")
    if chosen.backend == "native":
        find_architecture(file.architecture)
        if wishes := _wishes(settings):
            raise RequestError(
                f"The native engine has no GPUs and cannot use {', '.join(wishes)}.",
                remedy="Leave that out, or choose llama.cpp with --backend llama.",
            )
        with suppress(UnsupportedModelError):  # reported when it is opened
            chosen = _placed_natively(file, settings, parts(), chosen.reason, room, beside, kv_tokens, held)
    if chosen.backend == "llama":
        refuse_head_on_llama(draft, chosen.reason)
    return chosen


def gpus_here(promised: Sequence[Sequence[int]] = ()) -> "list[Device]":
    """The GPUs that llama.cpp sees, with their free memory less what loads in progress were promised on each.

    What such a load has allocated already counts twice. Empty without llama.cpp, which loading then reports.
    """
    from gpu_offload import devices

    try:
        found = devices.gpus()
    except LlamaCppMissingError:
        return []
    taken = [sum(parts[index] for parts in promised if index < len(parts)) for index in range(len(found))]
    return [replace(gpu, free_bytes=max(gpu.free_bytes - size, 0)) for gpu, size in zip(found, taken, strict=True)]


def place_draft(draft: ModelFile | None, settings: Settings, room: int, gpus: "Gpus") -> Placement | None:
    """The placement of a draft model with a KV cache of its own; None without one, and for a head."""
    if draft is None or is_head(draft):
        return None
    # Packed, not mapped: the next model's plan would count mapped weights as free memory.
    alone = replace(for_draft(settings), kv_mib=DRAFT_KV_MIB, packed_mib=0, from_disk=False)

    def near() -> "list[Device]":  # drafts are not worth a network's delay
        from gpu_offload.devices import WORKER

        return [replace(gpu, free_bytes=0) if gpu.backend == WORKER else gpu for gpu in gpus()]

    return place(draft, alone, room=room, gpus=near)


class _NativeParts(NamedTuple):
    """What the native engine takes for a model and its projector. types: of stored keys and values."""

    needs: "NativeNeeds"
    types: tuple[str, str]
    projector: Path | None
    projector_bytes: int


def _native_parts(file: ModelFile, settings: Settings, draft: ModelFile | None) -> _NativeParts:
    """Raises UnsupportedModelError for what the native engine cannot compute."""
    from models.needs import native_needs

    types, projector = native_kv_types(file, settings.kv_types), projector_of(file, settings.mmproj)
    together, projector_bytes = _projector_needs(projector, settings.threads) if projector else (None, 0)
    drafts = native_drafts(settings, draft)
    with open_adapters(settings.lora, file) as adapters:
        needs = native_needs(file, types, settings.threads, drafts, adapters, together)
    return _NativeParts(needs, types, projector, projector_bytes)


def _placed_natively(
    file: ModelFile,
    settings: Settings,
    parts: _NativeParts,
    reason: str,
    room: int,
    beside: Placement | None,
    kv_tokens: int | None,
    held: int,
) -> Placement:
    """The native engine's placement; llama.cpp's without sizes, if that fits into main memory and this does not."""
    needs, types = parts.needs, parts.types
    budget = None if settings.kv_mib is None else settings.kv_mib * 2**20
    if kv_tokens is not None:
        budget = needs.kv(kv_tokens)
    context = context_limit(file, settings.ctx) or trained_context(file)
    other = (beside.main_bytes if beside else 0) + needs.adapters + parts.projector_bytes
    placed = place_in_memory(needs, context, budget, room, other)
    if placed.problem:
        more = "\nThe setting from_disk lets a part of the weights stay on the disk, which is slow."
        if settings.backend == "auto" and llama_is_here():
            needed = place_on_gpus(file, settings, reason, room, [], beside).main_bytes
            alone = place_in_memory(needs, context, budget, room + held, other) if held else placed
            if alone.problem and needed + RESERVE_BYTES <= room + held:
                return Placement("llama", f"only llama.cpp fits into memory: it needs {needed >> 20:,} MiB")
            more += f"\nllama.cpp would need {needed >> 20:,} MiB and the reserve."
        placed = replace(placed, problem=placed.problem + more)
        if settings.from_disk:
            placed = place_from_disk(needs, context, budget, room, other)
    options = LlamaOptions(
        context_tokens=context, type_k=types[0], type_v=types[1], threads=settings.threads, mmproj=parts.projector
    )
    notes = _key_notes(file, settings.kv_types)
    if placed.on_disk:
        notes = (*disk_notes(placed, needs), *notes)
    return replace(
        placed,
        reason=reason,
        options=options,
        layers=needs.config.layers + 1,
        notes=notes,
        problem=placed.problem or (beside.problem if beside else ""),
        settings=settings,
        draft=beside,
        needs=needs,
    )


def _projector_needs(path: Path, threads: int | None) -> tuple[int, int]:
    """The most rows of a picture that see each other, and the bytes that an image encoder takes beside the native
    engine, with the pictures that are kept in memory.

    Raises ModelFileError, UnsupportedModelError.
    """
    from localllm.image_reader import KEPT_BYTES
    from models.vision.encoder import rows_together, vision_needs

    with open_model(path) as file:
        needs = vision_needs(file, threads)
        return rows_together(file), needs.weights + needs.buffers + KEPT_BYTES


def place_on_gpus(
    file: ModelFile,
    settings: Settings,
    reason: str,
    room: int,
    gpus: "Sequence[Device]",
    draft: Placement | None = None,
    *,
    dry_run: bool = False,
    reserve: int = 0,
) -> Placement:
    """llama.cpp's placement of a model with its projector, on GPUs, or in main memory if there are none.

    draft: the placed draft model. dry_run: use the sizes that llama.cpp reports, if any. reserve:
    bytes left free on every GPU in addition to the default; then the number of layers is the planner's. Raises what
    localllm.placement.llama.plan raises.
    """
    from localllm.placement.llama import plan

    request = plan_request(file, settings, projector_of(file, settings.mmproj), reason)
    request = replace(request, draft=draft, dry_run=dry_run, reserve_bytes=request.reserve_bytes + reserve)
    if reserve:
        request = replace(request, gpu_layers=None)
    placed = plan(file, gpus, room, request)
    return replace(placed, settings=settings, notes=(*placed.notes, *_key_notes(file, settings.kv_types)))


def plan_request(
    file: ModelFile, settings: Settings, projector: Path | None = None, reason: str = ""
) -> "LlamaRequest":
    """The settings for llama.cpp's devices and context, for a model and its projector."""
    from gpu_offload.memory import projector_bytes
    from localllm.placement.llama import LlamaRequest

    base = LlamaOptions(
        max_sequences=LLAMA_SEQUENCES,
        threads=settings.threads,
        main_gpu=settings.main_gpu or 0,
        # A named GPU takes everything; llama.cpp itself would ignore the name and spread the layers.
        split_mode=settings.split_mode or ("layer" if settings.main_gpu is None else "none"),
        lora=tuple(path for path, _ in usual_adapters(settings.lora)),
        mmproj=projector,
        image_min_tokens=settings.image_min_tokens,
        image_max_tokens=settings.image_max_tokens,
    )
    return LlamaRequest(
        reason,
        # llama.cpp allocates all cells at once: twice the limit holds a chat and other chats' prefixes.
        context_tokens=context_limit(file, settings.ctx),
        spare=settings.ctx is not None,
        kv_types=kv_types(file, settings.kv_types),
        gpu_layers=settings.gpu_layers,
        n_cpu_moe=settings.n_cpu_moe,
        about_gpus=tuple(name for name in ("main_gpu", "split_mode") if getattr(settings, name) is not None),
        projector_bytes=projector_bytes(projector) if projector else 0,
        base=base,
    )


def loaded_projector(file: ModelFile, mmproj: str | None, stored: Sequence[Path] = ()) -> Path | None:
    """The projector that would be loaded with a model; None without one.

    mmproj: the setting. stored: the projectors of its manifest. Raises RequestError if the one that the setting names
    is missing.
    """
    return projector_of(file, named_projector(mmproj, stored))


def named_projector(mmproj: str | None, stored: Sequence[Path]) -> str | None:
    """The setting mmproj, or the first of a manifest's projectors if it is not set."""
    return str(stored[0]) if stored and mmproj is None else mmproj


def native_kv_types(file: ModelFile, asked: tuple[KVType | None, KVType | None]) -> tuple[str, str]:
    """The types in which the native engine stores a model's keys and values. asked: as for kv_types."""
    keys, values = kv_types(file, asked)
    return keys or "f16", values or "f16"


def kv_types(file: ModelFile, asked: tuple[KVType | None, KVType | None]) -> tuple[KVType | None, KVType | None]:
    """The types of keys and values that are asked for, but q8_0 in place of q4_0 for keys with a bias.

    A bias makes a few numbers of a key many times as large as the others, which four bits cannot express: it destroys
    every model in which that was measured, with either backend (docs/speed.md). Decided by the header, so that a plan
    before the download agrees.
    """
    keys, values = asked
    biased = keys == "q4_0" and any(map(_KEY_BIAS.fullmatch, file.tensors))
    return "q8_0" if biased else keys, values


def _key_notes(file: ModelFile, asked: tuple[KVType | None, KVType | None]) -> tuple[str, ...]:
    """A note for the user if keys are stored in another type than the settings ask for."""
    return () if kv_types(file, asked) == asked else (KEPT_KEYS,)


def _wishes(settings: Settings) -> list[str]:
    """Names of the options in use that only llama.cpp supports."""
    asked = {
        "gpu_layers": settings.gpu_layers,
        "main_gpu": settings.main_gpu is not None,
        "split_mode": settings.split_mode,
        "n_cpu_moe": settings.n_cpu_moe,
        "rpc": settings.rpc,
    }
    return [name for name, value in asked.items() if value]


def automatic_choice(settings: Settings, native_lacks: Callable[[], str]) -> Placement:
    """llama.cpp if the settings need it, the native engine lacks something, or there is a GPU to use; else native.

    native_lacks: why the native engine cannot compute the model, "" if it can. Nothing is placed yet. Raises
    LlamaCppMissingError if the settings need llama.cpp and it is not installed.
    """
    from gpu_offload import devices

    wishes = _wishes(settings)
    try:
        found = devices.gpus()
    except LlamaCppMissingError as error:
        if wishes:
            raise
        return Placement("native", f"llama.cpp is not available: {error.reason}", settings=settings)
    if wishes:
        return Placement("llama", f"{', '.join(wishes)} set", settings=settings)
    if lacking := native_lacks():
        return Placement("llama", lacking, settings=settings)
    if settings.gpu_layers == 0:
        return Placement("native", "gpu_layers is 0", settings=settings)
    if found:
        return Placement("llama", f"there is a GPU, {found[0].label}", settings=settings)
    return Placement("native", "llama.cpp sees no GPU", settings=settings)


def _native_lacks(file: ModelFile, parts: Callable[[], _NativeParts]) -> str:
    """Why the native engine cannot compute the model, "" if its header shows no reason."""
    if file.architecture not in ARCHITECTURES:
        return f"the native engine does not know the architecture {file.architecture!r}"
    try:
        parts()
    except UnsupportedModelError as error:
        return f"the native engine cannot: {error.message}"
    return ""


def llama_is_here() -> bool:
    """Whether llama-cpp-python is installed and runs here."""
    try:
        llama()
    except LlamaCppMissingError:
        return False
    return True


def open_runner(
    file: ModelFile, settings: Settings, progress: LoadProgress | None = None, *, kv_tokens: int | None = None
) -> tuple[Runner, Placement]:
    """Place a model on this machine without a draft model, and load it: what place and open_placed do and raise."""
    return open_placed(file, place(file, settings, kv_tokens=kv_tokens), progress)


def open_placed(
    file: ModelFile, placed: Placement, progress: LoadProgress | None = None, draft: ModelFile | None = None
) -> tuple[Runner, Placement]:
    """Load the weights where they were placed; return the runner and where they are.

    draft: as for place; a head is loaded too, a draft model is the caller's to load, before this. With backend "auto",
    a model that the native engine turns out not to support goes to llama.cpp, with a warning. If a GPU has less memory
    than it reported, less is placed there, a warning is logged and the notes say so. progress is called on this thread;
    an exception in it ends the load. Raises OutOfMemoryError or LlamaCppMemoryError if memory does not suffice;
    UnsupportedModelError, LlamaCppError.
    """
    for note in file.notes:
        log.info("%s: %s", file.path.name, note)
    settings = placed.checked().settings
    runner: Runner | None = None
    if placed.backend == "native":
        try:
            with kernels_needed():
                runner, placed = _open_native(file, placed, progress, draft)
        except UnsupportedModelError as error:
            if settings.backend == "native" or not llama_is_here():
                raise
            reason = f"the native engine cannot: {error.message}"
            refuse_head_on_llama(draft, reason)
            room, beside = placed.uses[0].available, placed.draft
            placed = place_on_gpus(file, settings, reason, room, gpus_here(), beside, dry_run=True)
            log_fallback(file, placed)
    if runner is None:
        runner, placed = _open_llama(file, placed, progress)
    if KEPT_KEYS in placed.notes:
        log.warning("%s: %s", file.path.name, KEPT_KEYS)
    log.info("%s: %s", file.path.name, placed)
    return runner, placed


def log_fallback(file: ModelFile, placed: Placement) -> None:
    """Warn that llama.cpp computes what was placed on the native engine."""
    log.warning("%s: %s llama.cpp computes it instead.", file.path.name, placed.reason)


def _open_native(
    file: ModelFile, placed: Placement, progress: LoadProgress | None, draft: ModelFile | None
) -> "tuple[NativeRunner, Placement]":
    from cpu_kernels.choosing import choose
    from localllm.packed import find_packed, is_kept, open_from_disk, open_with_packed
    from models.native_runner import NativeRunner

    settings, use, needs = placed.settings, placed.uses[0], placed.needs
    assert needs is not None
    ready = find_packed(file, settings.packed_mib) if is_kept(file, settings.packed_mib) else None
    # All at once, so that no core idles.
    compile_all([*needs.kernels, choose, *(needs.packers if ready is None else ())], compiling(progress))

    def opened(ready: "PackedWeights | None") -> NativeRunner:
        with open_adapters(settings.lora, file) as adapters:
            return NativeRunner(
                file,
                kv_bytes=use.kv,
                threads=settings.threads,
                context=placed.options.context_tokens,
                kv_types=(placed.options.type_k, placed.options.type_v),
                progress=progress,
                ready=ready,
                drafts=native_drafts(settings, draft),
                config=needs.config,
                adapters=adapters,
            )

    try:
        if placed.on_disk:
            runner = open_from_disk(file, ready, settings.packed_mib, needs.weights, opened, progress)
        else:
            runner = open_with_packed(file, ready, settings.packed_mib, opened)
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise OutOfMemoryError(
            f"The system gave no memory for the model:\n{placed.sums()}\n"
            "A limit of this process (ulimit -v) may be lower than the machine's memory."
        ) from error
    if placed.options.mmproj:
        _add_projector(runner, placed, placed.options.mmproj, progress)
    return runner, replace(placed, mapped=min(runner.mapped_bytes, use.weights))


def _add_projector(runner: "NativeRunner", placed: Placement, path: Path, progress: LoadProgress | None) -> None:
    """Load the image encoder. Closes the runner if that fails: raises what NativeProjector raises."""
    from models.vision.projector import NativeProjector

    try:
        with open_model(path) as file:
            runner.projector = NativeProjector(
                file, placed.settings.threads, progress, context=placed.options.context_tokens
            )
        runner.check_projector(path)
    except BaseException:
        runner.close()
        raise


def _open_llama(file: ModelFile, placed: Placement, progress: LoadProgress | None) -> tuple[Runner, Placement]:
    from cpu_kernels.choosing import choose
    from gpu_offload.runner import LlamaCppRunner

    compile_all([choose], compiling(progress))  # tokens are chosen on the CPU
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            runner = LlamaCppRunner(file, placed.options, progress)
        except LlamaCppMemoryError as error:
            if attempt == _ATTEMPTS or not placed.device_bytes:
                raise
            log.warning("%s\nTrying again with less on the GPU.", error)
            placed = place_on_gpus(
                file,
                placed.settings,
                placed.reason,
                placed.uses[0].available,
                gpus_here(),
                placed.draft,
                dry_run=True,
                reserve=attempt * _STEP,
            )
            continue
        if attempt == 1:
            return runner, placed
        note = f"a GPU had less memory than it reported, so less was planned for it (attempt {attempt})"
        return runner, replace(placed, notes=(*placed.notes, note))
    raise AssertionError("the loop returns or raises")
