"""What the chat asks of whatever computes the answers: an engine in this process, or a server.

Two implementations: `engine_backend.EngineBackend` and `server_backend.ServerBackend`.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from localllm.engine.answer_parts import AnswerPart, PartKind
from localllm.engine.request import Counts, FinishReason, Progress, SamplingParams, Timings
from localllm.engine.tool_calls import ToolCall
from localllm.errors import LocalLLMError
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.engine.inspection import EngineSnapshot

# Told what is being done and which share of it is done, 0 to 1. Called on the thread that loads; what it raises ends
# the load.
LoadProgress = Callable[[str, float], None]


class LoadStoppedError(LocalLLMError):
    """Nobody waits for the model any more; raised by a LoadProgress."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message as the model sees it. pictures are PNG or JPEG files."""

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    pictures: tuple[bytes, ...] = ()

    @property
    def parts(self) -> str | list[dict[str, Any]]:
        """The content as engines take it: text, or parts where there are pictures, which come first."""
        if not self.pictures:
            return self.content
        return [*({"type": "image", "data": data} for data in self.pictures), {"type": "text", "text": self.content}]

    def call_objects(self) -> list[dict[str, Any]]:
        """The calls of tools as templates and servers take them."""
        calls = ({"name": call.name, "arguments": call.arguments} for call in self.calls)
        return [{"type": "function", "function": call} for call in calls]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to answer.

    continues says that the last turn is an answer that was cut and goes on. max_tokens and context count tokens; None
    is the model's own limit. A background request waits for everybody else and evicts nobody's cache.
    """

    turns: tuple[Turn, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    context: int | None = None
    thinking: bool | None = None
    continues: bool = False
    background: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes a model of the user's own of the present one; turns begin each of its conversations.

    parameters: those that were changed, in the names of Ollama's Modelfiles.
    """

    system: str
    parameters: dict[str, Any]
    turns: tuple[Turn, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns as manifests have them."""
        return [{"role": turn.role, "content": turn.content} for turn in self.turns]


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token that was chosen and its best rivals, as (text, probability)."""

    text: str
    probability: float
    rivals: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerUpdate:
    """What has come since the last poll. counts, timings and progress are the newest; finish_reason ends the answer."""

    parts: tuple[AnswerPart, ...] = ()
    counts: Counts = field(default_factory=Counts)
    timings: Timings = field(default_factory=Timings)
    progress: Progress | None = None
    choices: tuple[TokenChoice, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    seed: int | None = None


class Answer(Protocol):
    """An answer on its way. Poll it from one place; the update with a finish_reason is the last."""

    def poll(self) -> AnswerUpdate | None:
        """Return what is new, or None. Never waits."""

    def cancel(self) -> None:
        """Ask to stop. The last update still comes."""


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

    def submit(self, request: ChatRequest) -> Answer:
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


def join_parts(parts: Iterable[AnswerPart]) -> tuple[AnswerPart, ...]:
    """Join neighbours of one kind as one part, so that a front end draws them once."""
    joined: list[AnswerPart] = []
    for part in parts:
        if joined and joined[-1].kind == part.kind and part.kind is not PartKind.TOOL_CALLS:
            joined[-1] = AnswerPart(part.kind, joined[-1].text + part.text)
        else:
            joined.append(part)
    return tuple(joined)
