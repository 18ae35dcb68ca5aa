"""A model ready to answer: its file, tokenizer, chat template and engine."""

import contextlib
import ctypes
import gc
import logging
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cpu_kernels.cores import usable_processors
from gguf_io import ModelFile, load_chat_template, load_tokenizer, open_model
from gguf_io.chat_template import ChatTemplate
from gguf_io.image_rows import ReadPicture
from gguf_io.pictures import Budget
from gguf_io.runner_info import AdapterSet, LoadProgress
from gguf_io.tokenizer import Tokenizer
from localllm.engine.disk_cache import digest_of, disk_cache_of
from localllm.engine.drafter import Drafter, DraftModel, SelfDrafter
from localllm.engine.engine import Engine
from localllm.engine.measured import Measured, key_of
from localllm.engine.request import WITH_PROJECTOR
from localllm.engine.restore_costs import RestoreCosts
from localllm.engine.runner import DraftsItself, Projector, SeesImages, sees_images
from localllm.engine.sequence import adapter_set
from localllm.errors import RequestError
from localllm.image_reader import ImageReader, image_folder
from localllm.placement.backends import open_placed, place
from localllm.placement.companions import draft_file, usual_adapters
from localllm.placement.memory import context_note
from localllm.placement.placement import Placement
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.engine.constraint import Constraint, ConstraintKind, ConstraintVocabulary

MOST_THREADS_EACH = 4  # on each processor, before a warning
_DIGEST_S = 30.0  # how long the first picture waits for the digest of its encoder's file

log = logging.getLogger(__name__)


class LoadedModel:
    """A loaded model, made by `load_model`. Thread-safe, except `close`.

    placement: its backend, where its bytes are, and why. shared_prefixes: prompts of system text and tools alone,
    cached by localllm.answer.rendering. tool_histories: of conversations, kept by localllm.answer.late_tools.
    """

    def __init__(
        self,
        file: ModelFile,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        engine: Engine,
        placement: Placement,
    ) -> None:
        self.file = file
        self.tokenizer = tokenizer
        self.template = template
        self.engine = engine
        self.placement = placement
        self.shared_prefixes: dict[str, tuple[int, ...]] = {}
        self.tool_histories: dict[Any, Any] = {}
        self._images_lock = threading.Lock()
        self._images: ImageReader | None = None
        self._vocabulary_lock = threading.Lock()
        self._constraint_vocabulary: ConstraintVocabulary | None = None

    @property
    def sees_images(self) -> bool:
        """Whether the model reads images."""
        return sees_images(self.engine.runner)

    def see(self, data: bytes, budget: Budget | None = None, namespace: str = "") -> ReadPicture:
        """An image or a WAV as rows and token ids. Raises RequestError if the model has no projector, PictureError.

        budget: None for the settings'. namespace: users of others do not share encoded images.
        """
        return self._reader().see(data, budget or self.image_budget, namespace)

    def image_tokens(self, data: bytes, budget: Budget, namespace: str = "") -> int:
        """About how many tokens an image takes, without encoding it. Raises as `see` does."""
        return self._reader().tokens(data, budget, namespace)

    def _reader(self) -> ImageReader:
        runner = self.engine.runner
        if not isinstance(runner, SeesImages) or runner.projector is None:
            raise RequestError(
                f"{self.file.path.name} was loaded without a projector, so it reads text only, not images or sound.",
                remedy=WITH_PROJECTOR,
            )
        with self._images_lock:
            self._images = self._images or self._image_reader(runner.projector)
        return self._images

    @property
    def image_budget(self) -> Budget:
        """What a picture may cost unless a request says otherwise."""
        settings = self.placement.settings
        return Budget(settings.image_min_tokens, settings.image_max_tokens)

    def _image_reader(self, projector: Projector) -> ImageReader:
        path = self.placement.options.mmproj
        assert path is not None
        with open_model(path) as file:
            states = file.states
        folder, digest = (image_folder(), digest_of(states)) if self.placement.settings.disk_cache else (None, None)

        def identity() -> str:
            if digest is not None:
                digest.wait(_DIGEST_S)
            return f"{self.placement.backend}/{(digest and digest.value) or states}"

        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special=False, parse_special=True)

        return ImageReader(projector, identity, encode, folder)

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
        with self._images_lock:
            if self._images is not None:
                self._images.close()
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
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


def load_model(
    path: str | Path,
    settings: Settings,
    progress: LoadProgress | None = None,
    template: str | None = None,
    placed: Placement | None = None,
) -> LoadedModel:
    """Open, place, load and start a model, with the settings' draft model or head.

    progress: called on this thread. template: a Jinja chat template that replaces the file's. placed: where to load it,
    with these settings; None places it on this machine. Raises ModelFileError, TokenizerError, TemplateError, what
    place and open_placed raise, and RequestError if the draft's vocabulary differs.
    """
    with contextlib.ExitStack() as opened:  # closes everything if something fails
        file = opened.enter_context(open_model(path))
        if note := context_note(file, settings.ctx):
            log.warning("%s", note)
        if (settings.threads or 0) > MOST_THREADS_EACH * usable_processors():
            log.warning("%d threads on %d processors wait for each other", settings.threads, usable_processors())
        drafter: Drafter | None = None
        # The tokenizer is read while the weights are packed, which does not hold the GIL.
        with ThreadPoolExecutor(1, "tokenizer") as executor, draft_file(settings.draft) as draft:
            loading = executor.submit(load_tokenizer, file)
            chat_template = load_chat_template(file, template)
            placed = (placed or place(file, settings, draft=draft)).checked()
            if draft is not None:
                _check_vocabulary(draft, loading.result(), settings.draft)
                if placed.draft is not None:
                    drafter, where = _load_draft(draft, placed.draft, progress)
                    opened.callback(drafter.close)
                    placed = placed.beside(where)
            runner, placed = open_placed(file, placed, _failing_with(loading, progress), draft)
            opened.callback(runner.close)
            tokenizer = loading.result()
            drafts = repr(draft and draft.states)
        adapters: AdapterSet = ()
        if settings.lora:
            chosen = [(number, scale) for number, (_, scale) in enumerate(usual_adapters(settings.lora))]
            adapters = adapter_set(chosen, runner.info.adapter_count)
        disk = disk_cache_of(runner.info, settings.pinned_percent / 100) if settings.disk_cache else None
        if drafter is None and runner.info.can_draft and isinstance(runner, DraftsItself):
            drafter = SelfDrafter(runner)
        if drafter is not None:
            drafter.recall(Measured("draft_costs", key_of(runner.info, repr(placed.options), drafts)))
        engine = Engine(
            runner,
            tokenizer,
            context_limit=settings.ctx,
            max_running=settings.parallel,
            max_waiting=2 * settings.max_queue,  # of all clients; the server limits each one's share
            disk=disk,
            drafter=drafter,
            adapters=adapters,
            pinned_share=settings.pinned_percent / 100,
            costs=RestoreCosts(key_of(runner.info, repr(placed.options))),
        )
        opened.pop_all()
    engine.start()
    return LoadedModel(file, tokenizer, chat_template, engine, placed)


def _failing_with(loading: "Future[Tokenizer]", progress: LoadProgress | None) -> LoadProgress:
    """A progress callback that aborts the load as soon as the tokenizer has failed to load."""

    def report(phase: str, share: float) -> None:
        if loading.done():
            loading.result()
        if progress is not None:
            progress(phase, share)

    return report


def _check_vocabulary(draft: ModelFile, tokenizer: Tokenizer, name: str | None) -> None:
    if not tokenizer.agrees_with(load_tokenizer(draft)):
        raise RequestError(f"{name} cannot draft for this model: its vocabulary differs.", remedy="Leave out --draft.")


def _load_draft(file: ModelFile, placed: Placement, progress: LoadProgress | None) -> tuple[DraftModel, Placement]:
    """Load the draft model with its own KV cache."""
    runner, placed = open_placed(file, placed, progress)
    try:
        return DraftModel(runner), placed
    except RequestError:
        runner.close()
        raise
