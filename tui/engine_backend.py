"""The chat's in-process backend: one loaded model and its engine, which is imported at the first load."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.answer.placeholders import has_images
from localllm.answer.request import AnswerRequest
from localllm.errors import RequestError
from localllm.library.entry import Source
from localllm.library.errors import ModelNotFoundError
from localllm.library.lookup import find
from localllm.library.names import ModelName
from localllm.library.places import own_store
from localllm.settings import Settings
from tui.backend import LoadedInfo, PickerRow

if TYPE_CHECKING:
    from gguf_io.media import View
    from gguf_io.runner_info import LoadProgress
    from localllm.answer.local import LocalModel
    from localllm.answer.local_stream import LocalStream
    from localllm.engine.inspection import EngineSnapshot
    from localllm.engine.request import Counts
    from localllm.front.models import FoundModel
    from localllm.library.entry import LibraryModel
    from localllm.library.modelfile import Modelfile
    from localllm.placement.loaded_model import LoadedModel
    from localllm.placement.placement import Placement
    from tui.laboratory import Laboratory

CLOSE_S = 1.0  # for a load in progress to end when the program ends


class EngineBackend:
    """Implements Backend, which documents the methods, with one loaded model at a time. Thread-safe."""

    def __init__(self, settings_with: Callable[[Mapping[str, object]], Settings]) -> None:
        """settings_with: maps a model's own settings to those settings overridden by the user's."""
        self._settings_with = settings_with
        self._lock = threading.Lock()
        self._model: LocalModel | None = None
        self._found: LibraryModel | None = None
        self._info: LoadedInfo | None = None

    @property
    def info(self) -> LoadedInfo | None:
        return self._info

    def load(self, name: str, progress: "LoadProgress", pull: bool = True) -> LoadedInfo:
        """Frees the current model before loading the new one, so memory never holds both."""
        from gguf_io import open_model
        from localllm.front.models import FoundModel, find_or_pull

        with self._lock:
            settings = self._settings_with({})
            found = find_or_pull(name, settings, progress) if pull else find(name, settings)
            chosen = FoundModel.of(found, self._settings_with)
            with open_model(found.path):
                pass  # keep the current model if the file cannot be read
            self._close()
            progress(f"loading {found.name}", 0.0)
            model = chosen.load(found.name, progress)
            try:
                progress(f"loading {found.name}", 1.0)  # the last chance to stop the load
            except BaseException:
                model.loaded.close()
                raise
            self._model, self._found = model, found
            self._info = info = _info(model.loaded, chosen, name)
        return info

    def submit(self, request: AnswerRequest) -> "LocalStream":
        if self._model is None or self._info is None:
            raise RequestError("No model is loaded. Choose one with /load.")
        if not self._info.converses and request.max_tokens is None:
            # A base model rarely stops by itself, and its context rolls.
            request = replace(request, max_tokens=self._model.loaded.engine.context // 2)
        return self._model.prepare(request).submit()

    def count_tokens(self, text: str) -> int | None:
        model = self._model
        return len(model.tokenizer.encode(text, add_special=False)) if model else None

    def see_picture(self, data: bytes, least: int | None = None, most: int | None = None) -> "View | None":
        """Encodes the picture; the result is cached for the request."""
        from localllm.answer.rendering import budget_of

        model = self._model
        return model.loaded.see(data, budget_of(None, (least, most), model.loaded)).view if model else None

    def expected_counts(self, request: AnswerRequest) -> "Counts | None":
        """None also for a conversation with pictures, which would have to be encoded."""
        model = self._model
        if model is None or has_images(request.messages):
            return None
        try:
            return model.expected_counts(request).result()
        except CancelledError:  # the model is being unloaded
            return None

    def models(self, near: str | None) -> Sequence[PickerRow]:
        """Local models, GGUF files in the current model's folder, and suggestions to pull."""
        from tui.choices import model_choices

        settings = self._settings_with({})
        return model_choices(settings, self._found.path if self._found else None, near)

    def save(self, name: str, recipe: "Modelfile") -> None:
        """Does not copy the weights. Raises RequestError if the name exists."""
        from localllm.library.create import create
        from localllm.library.own_store import OwnStore

        settings, found, target = self._settings_with({}), self._found, ModelName.parse(name)
        if found is None:
            raise RequestError("No model is loaded. Choose one with /load.")
        try:
            find(name, settings)
        except ModelNotFoundError:
            create(OwnStore(own_store(settings)), target, recipe, found)
        else:
            raise RequestError(f"Model {name} already exists. Choose another name: /save NAME.")

    def inspect(self) -> "Future[EngineSnapshot] | None":
        return self._model.loaded.engine.inspect() if self._model else None

    def laboratory(self) -> "Laboratory | None":
        """Reads the model's header."""
        from tui.laboratory import Laboratory

        model, info = self._model, self._info
        if not (model and info and info.settings):
            return None
        return Laboratory.of_file(model.loaded.file, info.settings.kv_types, info.settings.threads)

    def memory_bytes(self) -> int | None:
        """Resident memory of this process."""
        import psutil

        return int(psutil.Process().memory_info().rss)

    def close(self) -> None:
        if self._lock.acquire(timeout=CLOSE_S):
            try:
                self._close()
            finally:
                self._lock.release()

    def _close(self) -> None:
        from localllm.placement.loaded_model import release_memory

        if self._model:
            self._model.loaded.close()
            self._model = self._found = self._info = None
            release_memory()


def _info(model: "LoadedModel", found: "FoundModel", name: str) -> LoadedInfo:

    converses = not model.template.is_default
    notice = None
    built_in = found.entry.source is Source.BUILT_IN
    if built_in:
        notice = "This is the built-in demonstration model: small stories, help with localllm. F4 offers larger ones."
    elif not converses:
        notice = "This model has no chat template: it continues your text."
    return LoadedInfo(
        name=name,
        place=_place(model.placement),
        context=model.engine.context,
        converses=converses,
        sees=model.sees_images,
        titles=not built_in,
        notice=notice,
        settings=found.settings,
    )


def _place(placed: "Placement") -> str:
    """The backend's name and how many layers run on GPUs."""
    on_gpus = placed.options.gpu_layers or 0
    return f"{placed.name}, {f'{on_gpus}/{placed.layers} layers on GPU' if on_gpus else 'CPU'}"
