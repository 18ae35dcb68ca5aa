"""The interface to the chat's models, implemented by `engine_backend` (in-process) and `server_backend`."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from localllm.answer.event import AnswerStream
from localllm.answer.request import AnswerRequest
from localllm.errors import LocalLLMError
from localllm.settings import Settings

if TYPE_CHECKING:
    from gguf_io.media import View
    from gguf_io.runner_info import LoadProgress
    from localllm.engine.inspection import EngineSnapshot
    from localllm.engine.request import Counts
    from localllm.library.modelfile import Modelfile
    from tui.laboratory import Laboratory


def short_name(model: str) -> str:
    """A model's name as every part of the chat shows it: of a path, a URL or a repository, the last part."""
    return model.replace("\\", "/").rstrip("/").rpartition("/")[2]


class LoadStoppedError(LocalLLMError):
    """The load was stopped; raised by a LoadProgress."""


@dataclass(frozen=True, slots=True)
class LoadedInfo:
    """The current model. name: as the user gave it. context: in tokens. notice: shown to the user.

    place: where it runs, e.g. "llama.cpp, 20/29 layers on GPU". converses: False if it only completes text. sees:
    whether it reads pictures. titles: False if it is too small to title a conversation. settings: the model's own,
    overridden by the user's; None if unknown.
    """

    name: str
    place: str
    context: int | None
    converses: bool = True
    sees: bool = True
    titles: bool = True
    notice: str | None = None
    settings: Settings | None = None


@dataclass(frozen=True, slots=True)
class PickerRow:
    """A model that could be loaded. Sizes are bytes; None is unknown.

    memory: for the weights and a conversation of a few thousand tokens. speed: expected decoding speed in tokens per
    second. source: where it comes from. here: False if it must be pulled first; suits and licence are then set.
    """

    name: str
    size: int | None = None
    quantization: str = ""
    parameters: str = ""
    context: int | None = None
    memory: int | None = None
    loaded: bool = False
    source: str = ""
    here: bool = True
    suits: str = ""
    licence: str = ""
    speed: float | None = None


class Backend(Protocol):
    """Runs the chat's models. Methods other than info, inspect and memory_bytes may block: call them in a thread.

    All raise LocalLLMError with a message for the user.
    """

    @property
    def info(self) -> LoadedInfo | None:
        """The current model."""

    def load(self, name: str, progress: "LoadProgress", pull: bool = True) -> LoadedInfo:
        """Replace the current model; keeps it if the new one cannot be found. pull: whether to download if missing."""

    def submit(self, request: AnswerRequest) -> AnswerStream:
        """Start an answer."""

    def count_tokens(self, text: str) -> int | None:
        """Number of tokens in a text; None if unknown."""

    def see_picture(self, data: bytes, least: int | None = None, most: int | None = None) -> "View | None":
        """What the model will see of a picture file, within a budget of tokens; None if unknown.

        A local model encodes it, which answers then need not do. Raises RequestError if the model reads text only.
        """

    def expected_counts(self, request: AnswerRequest) -> "Counts | None":
        """The counts with which an answer would start now: what it would reuse and compute; None if unknown.

        Nothing is computed or changed.
        """

    def models(self, near: str | None) -> Sequence[PickerRow]:
        """Models to choose from. near: the name of the current model."""

    def save(self, name: str, recipe: "Modelfile") -> None:
        """Create a model from the current one, with the recipe's system prompt, parameters and messages."""

    def inspect(self) -> "Future[EngineSnapshot] | None":
        """A future of a snapshot of the engine's state; None if the engine cannot be inspected."""

    def laboratory(self) -> "Laboratory | None":
        """What the current model's steps cost; None if unknown."""

    def memory_bytes(self) -> int | None:
        """Memory in use for the model; None if unknown."""

    def close(self) -> None:
        """Free the model. Idempotent."""
