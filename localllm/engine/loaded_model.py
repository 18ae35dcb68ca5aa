"""A model ready to answer: its file, tokenizer, chat template and engine."""

import contextlib
import ctypes
import gc
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gguf_io import ModelFile, load_chat_template, load_tokenizer, open_model
from gguf_io.chat_template import ChatTemplate
from gguf_io.tokenizer import Tokenizer
from localllm.engine.backends import BackendChoice, open_runner
from localllm.engine.companions import draft_beside, draft_file, for_draft, is_head, usual_adapters
from localllm.engine.disk_cache import disk_cache_of
from localllm.engine.drafter import Drafter, DraftModel, SelfDrafter
from localllm.engine.engine import Engine
from localllm.engine.runner import DraftsItself, ImagePieces, SeesImages
from localllm.engine.sequence import adapter_set
from localllm.errors import RequestError
from localllm.memory import context_note, model_memory
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.engine.constraint import Constraint, ConstraintKind, ConstraintVocabulary

log = logging.getLogger(__name__)
DRAFT_KV_MIB = 256  # a draft model's KV cache

# Called with a load's phase and its completed share, 0 to 1. An exception aborts the load.
LoadProgress = Callable[[str, float], None]


class LoadedModel:
    """A loaded model, made by `load_model`. Thread-safe, except `close`.

    backend: its backend, where its weights are, and why. adapters: the files of its LoRA adapters, each with its
    default weight. trunks: prompts of system text and tools alone, cached by localllm.answer.rendering.
    """

    def __init__(
        self,
        file: ModelFile,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        engine: Engine,
        backend: BackendChoice,
        adapters: Sequence[tuple[Path, float]] = (),
    ) -> None:
        self.file = file
        self.tokenizer = tokenizer
        self.template = template
        self.engine = engine
        self.backend = backend
        self.adapters = adapters
        self.trunks: dict[str, tuple[int, ...]] = {}
        self._vocabulary_lock = threading.Lock()
        self._constraint_vocabulary: ConstraintVocabulary | None = None

    @property
    def sees_images(self) -> bool:
        """Whether the model reads images."""
        return isinstance(self.engine.runner, SeesImages) and self.engine.runner.projector is not None

    def image_tokens(self, data: bytes) -> int:
        """Context tokens of an image. Encodes it, and raises as `see` does."""
        return sum(len(piece) if isinstance(piece, tuple) else len(piece.ids) for piece in self.see(data))

    def see(self, data: bytes) -> ImagePieces:
        """Encode an image. Raises RequestError if the model cannot read images, PictureError, LlamaCppError."""
        runner = self.engine.runner
        if not isinstance(runner, SeesImages):
            raise RequestError(
                f"{self.file.path.name} runs on the {runner.info.backend} engine, which reads text only, not images. "
                "Load it with --backend llama and its projector, --mmproj FILE."
            )
        if runner.projector is None:
            raise RequestError(
                f"{self.file.path.name} was loaded without a projector, so it reads text only, not images. "
                "Put the model's mmproj file into its folder, or pass --mmproj FILE."
            )
        return runner.projector.see(data)

    def constraint(
        self, kind: "ConstraintKind", source: str = "", after: tuple[str, str] | None = None
    ) -> "Constraint":
        """Compile a constraint for a GenerationRequest. Raises RequestError.

        after: the markers of the reasoning that precedes the constrained text; see compile_constraint.
        """
        from localllm.engine.constraint import compile_constraint

        return compile_constraint(kind, source, self.constraint_vocabulary(), after)

    def constraint_vocabulary(self) -> "ConstraintVocabulary":
        """The vocabulary that constraints share. The first call indexes it, which may take seconds."""
        from localllm.engine.constraint import ConstraintVocabulary

        with self._vocabulary_lock:
            if self._constraint_vocabulary is None:
                self._constraint_vocabulary = ConstraintVocabulary(self.tokenizer)
            return self._constraint_vocabulary

    def close(self) -> None:
        """Cancel all generations and free everything. Idempotent."""
        self.engine.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def release_memory() -> None:
    """Return the memory of closed models that are no longer referenced to the system.

    Engine and runner refer to each other, so their arrays live until the garbage collector runs; then glibc keeps the
    freed memory until malloc_trim.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def load_model(
    path: str | Path,
    settings: Settings,
    progress: LoadProgress | None = None,
    template: str | None = None,
    main_memory: int | None = None,
) -> LoadedModel:
    """Open, plan, load and start a model, with the settings' draft model or head.

    progress: called on this thread. template: a Jinja chat template that replaces the file's. main_memory: bytes to
    plan with; None is the machine's free memory. Raises ModelFileError, TokenizerError, TemplateError, what open_runner
    raises, and RequestError if the draft's vocabulary differs.
    """
    with contextlib.ExitStack() as opened:  # closes everything if something fails
        file = opened.enter_context(open_model(path))
        if note := context_note(file, settings.ctx):
            log.warning("%s", note)
        drafter: Drafter | None = None
        # The tokenizer is read while the weights are packed, which does not hold the GIL.
        with ThreadPoolExecutor(1, "tokenizer") as executor, draft_file(settings) as draft:
            loading = executor.submit(load_tokenizer, file)
            chat_template = load_chat_template(file, template)
            if draft is not None and (drafter := _load_draft(draft, loading.result(), settings, progress)):
                opened.callback(drafter.close)
            runner, backend = open_runner(file, settings, _failing_with(loading, progress), main_memory, draft=draft)
            opened.callback(runner.close)
            tokenizer = loading.result()
        files = usual_adapters(settings)
        chosen = [(number, scale) for number, (_, scale) in enumerate(files)]
        adapters = adapter_set(chosen, runner.info.adapter_count) if chosen else ()
        disk = disk_cache_of(runner.info, adapters) if settings.disk_cache else None
        if drafter is None and runner.info.can_draft and isinstance(runner, DraftsItself):
            drafter = SelfDrafter(runner)
        engine = Engine(
            runner,
            tokenizer,
            context_limit=settings.ctx,
            max_running=settings.parallel,
            max_waiting=2 * settings.max_queue,  # of all clients; the server limits each one's share
            disk=disk,
            drafter=drafter,
            adapters=adapters,
        )
        opened.pop_all()
    engine.start()
    return LoadedModel(file, tokenizer, chat_template, engine, backend, files)


def draft_bytes(draft: ModelFile | None) -> int:
    """Bytes of a draft model, including its KV cache; 0 without one, and for a head, which is planned with its model.

    draft: from draft_file.
    """
    if (model := draft_beside(draft)) is None:
        return 0
    memory = model_memory(model)
    return memory.weights + memory.buffers + DRAFT_KV_MIB * 2**20


def _failing_with(loading: "Future[Tokenizer]", progress: LoadProgress | None) -> LoadProgress:
    """A progress callback that aborts the load as soon as the tokenizer has failed to load."""

    def report(phase: str, share: float) -> None:
        if loading.done():
            loading.result()
        if progress is not None:
            progress(phase, share)

    return report


def _load_draft(
    draft: ModelFile, tokenizer: Tokenizer, settings: Settings, progress: LoadProgress | None
) -> DraftModel | None:
    """Load the draft model with its own KV cache; None for a head, which the runner loads with its model."""
    if not tokenizer.agrees_with(load_tokenizer(draft)):
        raise RequestError(f"{settings.draft} cannot draft for this model: its vocabulary differs. Leave out --draft.")
    if is_head(draft):
        return None
    # Packed, not mapped: the next model's plan would count mapped weights as free memory.
    alone = replace(for_draft(settings), kv_mib=DRAFT_KV_MIB, packed_mib=0, from_disk=False)
    runner, _ = open_runner(draft, alone, progress)
    try:
        return DraftModel(runner)
    except RequestError:
        runner.close()
        raise
