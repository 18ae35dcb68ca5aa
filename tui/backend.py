"""Where the chat's models come from: this machine, or a server. `engine_backend` and `server_backend` have both."""

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

# Called on the thread that loads, with what is being done and which share of it is done, 0 to 1. What it raises ends
# the load.
LoadProgress = Callable[[str, float], None]


class LoadStoppedError(LocalLLMError):
    """The load was stopped; raised by a LoadProgress."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes a model of the user's own of the present one; messages begin each of its conversations.

    parameters: those that were changed, in the names of Ollama's Modelfiles.
    """

    system: str
    parameters: dict[str, Any]
    messages: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that answers. context is in tokens; notice is something the user should know about it.

    place says where it is computed, e.g. "llama.cpp, 20/29 layers on GPU". converses is False for a model that only
    continues text, sees for one that reads no pictures, titles for one that is too small to name a conversation.
    settings are the user's with the model's own below them, None where they are not known.
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

    memory is for the weights and a conversation of some thousand tokens. source is whose it is; one that is not here
    has to be pulled first, and says what it suits and under which licence it comes.
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


class Backend(Protocol):
    """Whatever computes the answers.

    Every method but info, inspect and memory_bytes may take long: call them in a thread. Methods raise LocalLLMError
    with a message for the user.
    """

    @property
    def info(self) -> ModelInfo | None:
        """The model that answers now."""

    def load(self, name: str, progress: LoadProgress, pull: bool = True) -> ModelInfo:
        """Make this the model that answers, in place of the one before, which stays where the new one cannot be had.

        pull: whether one that is not here may be brought here first.
        """

    def submit(self, request: AnswerRequest) -> AnswerStream:
        """Begin to answer."""

    def count_tokens(self, text: str) -> int | None:
        """Tokens of a text, or None where that cannot be known."""

    def picture_tokens(self, data: bytes) -> int | None:
        """Tokens of a picture's file, or None where that cannot be known. Raises where the model reads no pictures."""

    def models(self, near: str | None) -> Sequence[ModelChoice]:
        """Models to choose from; `near` is the name of the present one."""

    def save(self, name: str, recipe: Recipe) -> None:
        """Make a model of the present one, by another name."""

    def inspect(self) -> "Future[EngineSnapshot] | None":
        """Return what will hold a look inside the engine, or None where there is no engine to look into."""

    def memory_bytes(self) -> int | None:
        """Memory in use for the model, or None where that is not known."""

    def close(self) -> None:
        """Free the model. Idempotent."""
