"""The interface to the chat's models, implemented by `engine_backend` for this machine and by `server_backend`."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from localllm.answer.event import AnswerStream
from localllm.answer.request import AnswerRequest
from localllm.errors import LocalLLMError
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.engine.inspection import EngineSnapshot
    from localllm.measure.laboratory import ModelCosts

# Called on the loading thread with the phase and the share of it that is done, 0 to 1. An exception ends the load.
LoadProgress = Callable[[str, float], None]


class LoadStoppedError(LocalLLMError):
    """The load was stopped; raised by a LoadProgress."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A new model made from the current one. messages: start each of its conversations.

    parameters: the changed ones, under their names in Ollama's Modelfiles.
    """

    system: str
    parameters: dict[str, Any]
    messages: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The current model. context: in tokens. notice: shown to the user.

    place: where it runs, e.g. "llama.cpp, 20/29 layers on GPU". converses: False if it only continues text. sees:
    whether it reads pictures. titles: False if it is too small to name a conversation. settings: the user's over the
    model's own; None if unknown.
    """

    name: str
    place: str
    context: int | None
    converses: bool = True
    can_think: bool = False
    sees: bool = True
    titles: bool = True
    notice: str | None = None
    settings: Settings | None = None


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model that could be loaded. Sizes are bytes; None is unknown.

    memory: for the weights and a conversation of a few thousand tokens. speed: tokens a second that decoding should
    reach. source: where it comes from. here: False if it must be pulled first; it then has a use it suits and a
    licence.
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
    def info(self) -> ModelInfo | None:
        """The current model."""

    def load(self, name: str, progress: LoadProgress, pull: bool = True) -> ModelInfo:
        """Replace the current model, which stays if the new one cannot be found. pull: whether it may be downloaded."""

    def submit(self, request: AnswerRequest) -> AnswerStream:
        """Start an answer."""

    def count_tokens(self, text: str) -> int | None:
        """Tokens of a text; None if unknown."""

    def picture_tokens(self, data: bytes) -> int | None:
        """Tokens of a picture's file; None if unknown. Raises RequestError if the model cannot read pictures."""

    def models(self, near: str | None) -> Sequence[ModelChoice]:
        """Models to choose from. near: the name of the current one."""

    def save(self, name: str, recipe: Recipe) -> None:
        """Create a model from the current one."""

    def inspect(self) -> "Future[EngineSnapshot] | None":
        """A snapshot of the engine's state, soon; None where there is no engine to look into."""

    def costs(self) -> "ModelCosts | None":
        """What the current model's steps cost; None where that is not known. May block."""

    def memory_bytes(self) -> int | None:
        """Memory in use for the model; None if unknown."""

    def close(self) -> None:
        """Free the model. Idempotent."""
