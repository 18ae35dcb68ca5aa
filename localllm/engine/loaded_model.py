"""A model ready to answer: its file, tokenizer, chat template and engine. What every front end holds."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gguf_io import ModelFile, load_chat_template, load_tokenizer, open_model
from gguf_io.chat_template import ChatTemplate
from gguf_io.tokenizer import Tokenizer
from localllm.engine.adapters import adapter_set
from localllm.engine.backends import BackendChoice, for_draft, open_runner, usual_adapters
from localllm.engine.chat_prompt import ChatPrompt, RenderedChat
from localllm.engine.disk_cache import disk_cache_of
from localllm.engine.draft_model import DraftModel
from localllm.engine.engine import Engine
from localllm.engine.images import ImagePieces, PromptImages, SeesImages, has_images
from localllm.engine.runner import Runner
from localllm.errors import RequestError
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.engine.constraint import Constraint, ConstraintKind, ConstraintVocabulary

# Keys and values of a draft model: enough for some long conversations with a small one.
DRAFT_KV_MIB = 256

# Told what is being done and which share of it is done, 0 to 1.
LoadProgress = Callable[[str, float], None]


class LoadedModel:
    """One model. Thread-safe, except that close is for one thread; made by `load_model`.

    backend tells which runner computes it, where, and why.
    """

    def __init__(
        self, file: ModelFile, tokenizer: Tokenizer, template: ChatTemplate, engine: Engine, backend: BackendChoice
    ) -> None:
        self.file = file
        self.tokenizer = tokenizer
        self.template = template
        self.engine = engine
        self.backend = backend
        self._vocabulary_lock = threading.Lock()
        self._constraint_vocabulary: ConstraintVocabulary | None = None

    def tokenise(self, text: str) -> tuple[int, ...]:
        """Token ids of a raw prompt: BOS where the model wants it, special tokens' names are plain text."""
        return tuple(self.tokenizer.encode(text))

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        continues: bool = False,
        **extra: Any,
    ) -> ChatPrompt:
        """Render and tokenise a conversation that the assistant answers next. Raises TemplateError.

        continues: its last message is the beginning of that answer. A content may be a list of parts, {"type": "text",
        "text": str} and {"type": "image", "data": bytes}, a PNG or JPEG; RequestError where the model reads no images,
        PictureError for a picture that is not taken.
        """
        options = {"tools": tools, "enable_thinking": enable_thinking, **extra}
        images = PromptImages(self._see) if has_images(messages) else None
        if images:
            messages = images.hide(messages)
        chat = RenderedChat(self.tokenizer, self.template, messages[:-1] if continues else messages, options, images)
        begun, tokens, in_reasoning = chat.begun(messages[-1]) if continues else ("", (), chat.starts_in_reasoning)
        prompt = chat.tokens + tokens
        rows = images.rows if images else {}
        return ChatPrompt(chat.text + begun, prompt, chat, self.template.stop_strings, in_reasoning, rows)

    @property
    def sees_images(self) -> bool:
        """Whether a conversation may hold images."""
        return isinstance(self.engine.runner, SeesImages) and self.engine.runner.projector is not None

    def image_tokens(self, data: bytes) -> int:
        """Tokens of the context that a picture takes. Encodes it, and raises as `chat_prompt` does."""
        return sum(len(piece) if isinstance(piece, tuple) else len(piece.ids) for piece in self._see(data))

    def _see(self, data: bytes) -> ImagePieces:
        """A picture as the model reads it. Raises RequestError where it reads none, PictureError, LlamaCppError."""
        runner = self.engine.runner
        if not isinstance(runner, SeesImages):
            raise RequestError(
                f"{self.file.path.name} is computed by the {runner.info.backend} engine, which reads text only. "
                "Load it with --backend llama and its projector, --mmproj FILE."
            )
        if runner.projector is None:
            raise RequestError(
                f"{self.file.path.name} was loaded without a projector and reads text only. "
                "Put the model's mmproj file beside it, or name it with --mmproj FILE."
            )
        return runner.projector.see(data)

    def constraint(
        self, kind: "ConstraintKind", source: str = "", after: tuple[str, str] | None = None
    ) -> "Constraint":
        """Compile a constraint on the model's vocabulary, for a GenerationRequest. Raises RequestError.

        after: the markers of the reasoning that comes before it, as compile_constraint takes them.
        The first one takes up to some seconds longer, to index the vocabulary.
        """
        from localllm.engine.constraint import ConstraintVocabulary, compile_constraint

        with self._vocabulary_lock:
            if self._constraint_vocabulary is None:
                self._constraint_vocabulary = ConstraintVocabulary(self.tokenizer)
        return compile_constraint(kind, source, self._constraint_vocabulary, after)

    def close(self) -> None:
        """Cancel what runs and free everything. Idempotent."""
        self.engine.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def load_model(
    path: str | Path,
    settings: Settings,
    progress: LoadProgress | None = None,
    template: str | None = None,
    main_memory: int | None = None,
) -> LoadedModel:
    """Open, plan, load and start. Raises ModelFileError, TokenizerError, TemplateError or OutOfMemoryError.

    progress is called on this thread; what it raises ends the load and is raised again. template: a Jinja chat template
    to use instead of the file's. main_memory: bytes that llama.cpp may plan with; None asks the machine. The settings'
    draft model is loaded too; RequestError if it does not fit.
    """
    file = open_model(path)
    draft_model = None
    try:
        # The vocabulary is read while the weights are packed, which holds no lock of the interpreter.
        with ThreadPoolExecutor(1, "vocabulary") as beside:
            words = beside.submit(load_tokenizer, file)
            chat_template = load_chat_template(file, template)
            draft_model = _open_draft(settings.draft, words.result(), settings, progress) if settings.draft else None
            runner, backend = open_runner(file, settings, _ending_with(words, progress), main_memory)
            tokenizer = _or_close(words, runner)
        weights = [(number, scale) for number, (_, scale) in enumerate(usual_adapters(settings))]
        adapters = adapter_set(weights, runner.info.adapter_count)
        disk = disk_cache_of(runner.info, adapters) if settings.disk_cache else None
    except BaseException:
        file.close()
        if draft_model is not None:
            draft_model.close()
        raise
    engine = Engine(
        runner,
        tokenizer,
        context_limit=settings.ctx,
        max_running=settings.parallel,
        max_waiting=settings.max_queue,
        disk=disk,
        draft_model=draft_model,
        adapters=adapters,
    )
    engine.start()
    return LoadedModel(file, tokenizer, chat_template, engine, backend)


def _ending_with(words: "Future[Tokenizer]", progress: LoadProgress | None) -> LoadProgress:
    """Progress that ends the load as soon as the vocabulary turns out to be unusable."""

    def report(what: str, share: float) -> None:
        if words.done():
            words.result()
        if progress is not None:
            progress(what, share)

    return report


def _or_close(words: "Future[Tokenizer]", runner: Runner) -> Tokenizer:
    try:
        return words.result()
    except BaseException:
        runner.close()
        raise


def _open_draft(name: str, tokenizer: Tokenizer, settings: Settings, progress: LoadProgress | None) -> DraftModel:
    """Load the draft model, with a budget of its own for keys and values."""
    from localllm.library import resolve

    with open_model(resolve(name)) as file:
        if not tokenizer.agrees_with(load_tokenizer(file)):
            raise RequestError(f"{name} cannot draft for this model: its tokens are others. Leave out --draft.")
        runner, _ = open_runner(file, replace(for_draft(settings), kv_mib=DRAFT_KV_MIB), progress)
        return DraftModel(runner)
