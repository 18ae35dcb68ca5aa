"""Chooses and opens the runner of a model. Each backend is imported only when it is needed."""

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile
from localllm.engine.companions import (
    WITHOUT,
    draft_beside,
    native_drafts,
    projector_of,
    refuse_as_model,
    refuse_head_on_llama,
    usual_adapters,
)
from localllm.engine.runner import Runner
from localllm.errors import OutOfMemoryError, RequestError
from localllm.memory import (
    RESERVE_BYTES,
    MemoryPlan,
    context_limit,
    disk_notes,
    kv_bytes_in_file,
    native_memory,
    plan_from_disk,
    plan_memory,
    trained_context,
)
from localllm.settings import Settings

if TYPE_CHECKING:
    from gpu_offload.planner import PlanRequest
    from models.native_runner import NativeRunner
    from models.packed_file import PackedWeights

log = logging.getLogger(__name__)
LLAMA_SEQUENCES = 32  # handles for running requests and for cached prefixes


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Which backend computes a model, and why.

    backend: "remote" is another server. The others describe a loaded model. notes: where it is stored, a line each.
    device_bytes: memory on GPUs. device_layers: layers on GPUs, and in all. main_bytes: the native engine's main memory
    without keys and values. mapped_bytes: the part of it mapped from a file, which the system counts as free.
    """

    backend: Literal["native", "llama", "remote"]
    reason: str
    notes: tuple[str, ...] = ()
    device_bytes: int = 0
    device_layers: tuple[int, int] = (0, 0)
    main_bytes: int = 0
    mapped_bytes: int = 0

    @property
    def name(self) -> str:
        """The backend's display name."""
        return "llama.cpp" if self.backend == "llama" else self.backend

    @property
    def why(self) -> str:
        """The reason and the notes on one line."""
        return "; ".join([self.reason, *self.notes])

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def open_runner(
    file: ModelFile,
    settings: Settings,
    progress: Callable[[str, float], None] | None,
    main_memory: int | None = None,
    kv_tokens: int | None = None,
    draft: ModelFile | None = None,
) -> tuple[Runner, BackendChoice]:
    """Choose the backend, plan memory, and load the weights.

    main_memory: bytes to plan with; None is the machine's available memory. kv_tokens: plan the native engine's KV
    memory for this many tokens, instead of its budget (kv_mib). draft: the opened file of the draft setting
    (draft_file); if it is a head, it is loaded too. With backend "auto", a model that the native engine turns out not
    to support goes to llama.cpp. Raises what choose_backend raises; RequestError if the model's heads do not fit the
    types of keys and values; OutOfMemoryError or LlamaCppMemoryError if memory does not suffice.
    """
    from models.errors import UnsupportedModelError, kernels_needed

    for note in file.notes:
        log.info("%s: %s", file.path.name, note)
    choice = choose_backend(file, settings, main_memory, draft)
    if settings.kv_type_k or settings.kv_type_v:  # f16 fits every head
        kv_bytes_in_file(file, native_kv_types(settings))
    if choice.backend == "llama":
        runner, choice = _open_llama(file, settings, choice, progress, main_memory, draft)
    else:
        try:
            with kernels_needed():
                runner, plan = _open_native(file, settings, progress, kv_tokens, main_memory, draft)
            choice = replace(choice, main_bytes=plan.needed - plan.kv, notes=disk_notes(file, plan))
            choice = replace(choice, mapped_bytes=min(runner.mapped_bytes, plan.weights))
        except UnsupportedModelError as error:
            if settings.backend == "native" or not llama_is_here():
                raise
            choice = BackendChoice("llama", f"the native engine cannot: {error}")
            refuse_head_on_llama(draft, choice.reason)
            runner, choice = _open_llama(file, settings, choice, progress, main_memory, draft)
    log.info("%s: %s", file.path.name, choice)
    return runner, choice


def choose_backend(
    file: ModelFile, settings: Settings, room: int | None = None, draft: ModelFile | None = None
) -> BackendChoice:
    """The settings' backend; for "auto", llama.cpp if there is a GPU or the native engine cannot compute the model.

    "auto" also takes llama.cpp if only its plan fits into main memory. room: bytes of main memory; None is the
    machine's available memory. draft: as in open_runner. First adds workers on other machines as devices. Raises
    UnsupportedModelError if the choice is the native engine and it does not support the architecture; RequestError if
    the settings combine the native engine with options of llama.cpp only, or llama.cpp with a head that drafts; and
    what add_workers raises.
    """
    from models.registry import find_architecture

    refuse_as_model(file)
    if workers := [address.strip() for address in settings.rpc.split(",") if address.strip()]:
        from gpu_offload.rpc import add_workers

        add_workers(workers)
    if settings.backend == "auto":
        choice = automatic_choice(settings, lambda: _native_lacks(file, settings, draft))
        choice = _where_it_fits(choice, file, settings, room, draft)
    else:
        choice = BackendChoice(settings.backend, "chosen by the backend setting")
    if choice.backend == "llama":
        refuse_head_on_llama(draft, choice.reason)
    if choice.backend == "native":
        find_architecture(file.architecture)
        if wishes := _wishes(settings):
            raise RequestError(
                f"The native engine has neither GPUs, adapters nor images and cannot use {', '.join(wishes)}. "
                "Leave that out, or choose llama.cpp with --backend llama."
            )
    return choice


def plan_request(file: ModelFile, settings: Settings, projector: Path | None = None) -> "PlanRequest":
    """The settings for llama.cpp's devices and context, for a model and its projector."""
    from gpu_offload.memory import projector_bytes
    from gpu_offload.options import LlamaOptions
    from gpu_offload.planner import PlanRequest

    base = LlamaOptions(
        max_sequences=LLAMA_SEQUENCES,
        threads=settings.threads,
        main_gpu=settings.main_gpu or 0,
        # A named GPU takes everything; llama.cpp itself would ignore the name and spread the layers.
        split_mode=settings.split_mode or ("layer" if settings.main_gpu is None else "none"),
        lora=tuple(path for path, _ in usual_adapters(settings)),
        mmproj=projector,
    )
    return PlanRequest(
        # llama.cpp allocates all cells at once: twice the limit holds a chat and other chats' prefixes.
        context_tokens=context_limit(file, settings.ctx),
        spare=settings.ctx is not None,
        kv_types=(settings.kv_type_k, settings.kv_type_v),
        gpu_layers=settings.gpu_layers,
        cpu_expert_layers=settings.n_cpu_moe,
        about_gpus=tuple(name for name in ("main_gpu", "split_mode") if getattr(settings, name) is not None),
        projector_bytes=projector_bytes(projector) if projector else 0,
        base=base,
    )


def loaded_projector(file: ModelFile, settings: Settings, stored: Sequence[Path] = ()) -> Path | None:
    """The projector that would be loaded with a model; None without one, or if llama.cpp is not used.

    stored: the projectors of its manifest. Raises RequestError if the projector named by the settings is missing.
    """
    if settings.backend == "native" or not llama_is_here():
        return None
    return projector_of(file, with_projector(settings, stored))


def with_projector(settings: Settings, stored: Sequence[Path]) -> Settings:
    """The settings with the first of a manifest's projectors, unless they set mmproj."""
    return replace(settings, mmproj=str(stored[0])) if stored and settings.mmproj is None else settings


def native_kv_types(settings: Settings) -> tuple[str, str]:
    """The types in which the native engine stores keys and values."""
    return settings.kv_type_k or "f16", settings.kv_type_v or "f16"


def plan_native(
    file: ModelFile,
    settings: Settings,
    *,
    kv_tokens: int | None = None,
    room: int | None = None,
    draft: ModelFile | None = None,
    beside: int = 0,
) -> MemoryPlan:
    """The native engine's memory plan, from the header, with the settings' KV budget or one for kv_tokens.

    room: bytes of main memory; None is the machine's available memory. draft: as in open_runner. beside: bytes of a
    draft model. If the setting from_disk allows it, part of the weights may stay on the disk. Raises OutOfMemoryError,
    with the amounts and with llama.cpp's if that could be chosen; UnsupportedModelError.
    """
    memory = native_memory(file, native_kv_types(settings), settings.threads, native_drafts(settings, draft))
    budget = None if settings.kv_mib is None else settings.kv_mib * 2**20
    if kv_tokens is not None:
        budget = memory.kv(kv_tokens)
    context = context_limit(file, settings.ctx) or trained_context(file)
    memory = replace(memory, weights=memory.weights + beside)
    try:
        return plan_memory(memory, context, budget, room)
    except OutOfMemoryError as error:
        if settings.from_disk:
            return plan_from_disk(memory, context, budget, room)
        message = f"{error}\nThe setting from_disk lets a part of the weights stay on the disk, which is slow."
        if settings.backend == "auto" and llama_is_here():
            message += f"\nllama.cpp would need {_llama_needs(file, settings, room) >> 20:,} MiB and the reserve."
        raise OutOfMemoryError(message) from error


def _where_it_fits(
    choice: BackendChoice, file: ModelFile, settings: Settings, room: int | None, draft: ModelFile | None
) -> BackendChoice:
    """The choice, changed to llama.cpp if the native engine does not fit into memory and llama.cpp does."""
    from models.errors import UnsupportedModelError

    if choice.backend != "native":
        return choice
    room = available_memory() if room is None else room
    try:
        plan_native(file, replace(settings, backend="native", from_disk=False), room=room, draft=draft)
    except UnsupportedModelError:  # reported when it is opened
        return choice
    except OutOfMemoryError:
        if not llama_is_here():
            return choice
        needed = _llama_needs(file, settings, room)
        if needed + RESERVE_BYTES <= room:
            return BackendChoice("llama", f"only llama.cpp fits into memory: it needs {needed >> 20:,} MiB")
    return choice


def _llama_needs(file: ModelFile, settings: Settings, room: int | None) -> int:
    """Bytes of main memory in llama.cpp's plan without GPUs."""
    from gpu_offload.planner import plan

    made = plan(file, [], available_memory() if room is None else room, plan_request(file, settings))
    return made.uses[0].needed


def _wishes(settings: Settings) -> list[str]:
    """Names of the options in use that only llama.cpp supports."""
    asked = {
        "gpu_layers": settings.gpu_layers,
        "main_gpu": settings.main_gpu is not None,
        "split_mode": settings.split_mode,
        "n_cpu_moe": settings.n_cpu_moe,
        "lora": settings.lora,
        "rpc": settings.rpc,
        "mmproj": settings.mmproj not in (None, WITHOUT),
    }
    return [name for name, value in asked.items() if value]


def automatic_choice(settings: Settings, native_lacks: Callable[[], str]) -> BackendChoice:
    """llama.cpp if the settings need it, the native engine lacks something, or there is a GPU to use; else native.

    native_lacks: why the native engine cannot compute the model, "" if it can. Raises LlamaCppMissingError if the
    settings need llama.cpp and it is not installed.
    """
    from gpu_offload.devices import gpus
    from gpu_offload.errors import LlamaCppMissingError

    wishes = _wishes(settings)
    try:
        found = gpus()
    except LlamaCppMissingError as error:
        if wishes:
            raise
        return BackendChoice("native", f"llama.cpp is not available: {error.reason}")
    if wishes:
        return BackendChoice("llama", f"{', '.join(wishes)} set")
    if lacking := native_lacks():
        return BackendChoice("llama", lacking)
    if settings.gpu_layers == 0:
        return BackendChoice("native", "gpu_layers is 0")
    if found:
        return BackendChoice("llama", f"there is a GPU, {found[0].description or found[0].name}")
    return BackendChoice("native", "llama.cpp sees no GPU")


def _native_lacks(file: ModelFile, settings: Settings, draft: ModelFile | None) -> str:
    """Why the native engine cannot compute the model, "" if its header shows no reason."""
    from models.errors import UnsupportedModelError
    from models.registry import ARCHITECTURES

    if file.architecture not in ARCHITECTURES:
        return f"the native engine does not know the architecture {file.architecture!r}"
    try:
        native_memory(file, native_kv_types(settings), settings.threads, native_drafts(settings, draft))
    except UnsupportedModelError as error:
        return f"the native engine cannot: {error}"
    projector = projector_of(file, settings)
    return f"{projector.name} is its image projector, which needs llama.cpp" if projector else ""


def llama_is_here() -> bool:
    """Whether llama-cpp-python is installed and runs here."""
    from gpu_offload.errors import LlamaCppMissingError
    from gpu_offload.library import llama

    try:
        llama()
    except LlamaCppMissingError:
        return False
    return True


def _open_native(
    file: ModelFile,
    settings: Settings,
    progress: Callable[[str, float], None] | None,
    kv_tokens: int | None,
    room: int | None,
    draft: ModelFile | None,
) -> "tuple[NativeRunner, MemoryPlan]":
    from cpu_kernels.kernel import compile_all
    from localllm.packed import find_packed, is_kept, open_from_disk, open_with_packed
    from models.native_runner import NativeRunner
    from models.needs import native_needs
    from models.steps import compiling

    # Packed weights are verified while the plan is made.
    ready = find_packed(file, settings.packed_mib) if is_kept(file, settings.packed_mib) else None
    plan = plan_native(file, settings, kv_tokens=kv_tokens, room=room, draft=draft)
    kv_types, drafts = native_kv_types(settings), native_drafts(settings, draft)
    needs = native_needs(file, kv_types, settings.threads, drafts)
    # All at once, so that no core idles.
    compile_all([*needs.kernels, *(needs.packers if ready is None else ())], compiling(progress))

    def opened(ready: "PackedWeights | None") -> NativeRunner:
        return NativeRunner(
            file,
            kv_bytes=plan.kv,
            threads=settings.threads,
            context=context_limit(file, settings.ctx),
            kv_types=kv_types,
            progress=progress,
            ready=ready,
            drafts=drafts,
        )

    try:
        if plan.on_disk:
            runner = open_from_disk(file, ready, settings.packed_mib, plan.weights + plan.on_disk, opened, progress)
        else:
            runner = open_with_packed(file, ready, settings.packed_mib, opened)
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise OutOfMemoryError(
            f"The system gave no memory for the model:\n{plan}\n"
            "A limit of this process (ulimit -v) may be lower than the machine's memory."
        ) from error
    return runner, plan


def _open_llama(
    file: ModelFile,
    settings: Settings,
    choice: BackendChoice,
    progress: Callable[[str, float], None] | None,
    main_memory: int | None,
    draft: ModelFile | None,
) -> tuple[Runner, BackendChoice]:
    from gpu_offload.runner import open_planned

    request = replace(plan_request(file, settings, projector_of(file, settings)), draft=draft_beside(draft))
    runner, plan = open_planned(file, request, progress, main_memory)
    return runner, replace(
        choice,
        notes=plan.notes,
        device_bytes=plan.device_bytes,
        device_layers=(plan.options.gpu_layers or 0, plan.layers),
    )
