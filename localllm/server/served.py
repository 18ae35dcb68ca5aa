"""The models that requests may name, whoever computes them: an engine in this process, or a server elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from localllm.answer.event import AnsweringModel
from localllm.engine.engine import EngineStats
from localllm.library.behaviour import Behaviour
from localllm.library.entry import LibraryModel, ModelDefaults
from localllm.server.load_watch import LoadListener, LoadState
from localllm.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gguf_io.chat_template import ChatTemplate
    from gguf_io.tokenizer import Tokenizer


class ServedModel(AnsweringModel, Protocol):
    """A model that answers. Where only a server elsewhere has tokenizer and template, they raise RemoteError 501."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> "Tokenizer": ...

    @property
    def template(self) -> "ChatTemplate": ...


class Embedder(Protocol):
    """A model that turns texts into vectors, or pairs of texts into scores. Its methods block."""

    def batches(self, sizes: Sequence[int]) -> list[slice]:
        """Which texts to compute at once; sizes are about their tokens."""

    def embed(
        self, texts: Sequence[str | Sequence[int]], *, truncate: bool, dimensions: int | None
    ) -> "tuple[NDArray[np.float32], int]":
        """Rows of Euclidean length 1, float32[len(texts), dimensions], and how many tokens were read.

        dimensions keeps the first numbers of each row; None keeps all. truncate: whether long texts are cut or refused.
        """

    def rank(self, query: str, documents: Sequence[str], *, truncate: bool) -> "tuple[NDArray[np.float32], int]":
        """The score of each document for the query, higher is better, and how many tokens were read."""


class Entry(Protocol):
    """A model's name in a catalog."""

    @property
    def name(self) -> str: ...


EntryT = TypeVar("EntryT", bound=Entry)
ModelT = TypeVar("ModelT")


@dataclass(frozen=True, slots=True)
class ModelAbout:
    """What lists say of a model. Sizes are bytes, lengths tokens; 0 and "" are unknown.

    created: seconds since the epoch; modified: RFC 3339. digest: 64 hex digits that name the content.
    """

    name: str
    created: int
    modified: str
    digest: str
    size: int = 0
    format: str = "gguf"
    family: str = ""
    parameters: str = ""
    quantization: str = ""
    context: int = 0
    width: int = 0
    owner: str = "library"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Everything that is known of a model. info: metadata, by its keys; projector_info is of its projector's file."""

    about: ModelAbout
    capabilities: Sequence[str]
    template: str = ""
    behaviour: Behaviour = field(default_factory=Behaviour)
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    info: Mapping[str, Any] = field(default_factory=dict)
    projector_info: Mapping[str, Any] | None = None
    tensors: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """A model in memory, or one that loads. Sizes are bytes; seconds_left may be infinite.

    more: figures of its engine, by the names that they are shown under.
    """

    about: ModelAbout
    seconds_left: float
    size: int
    context: int
    device_bytes: int = 0
    loading: LoadState | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lease(Generic[ModelT]):
    """A model that stays loaded while it is held. load_s: how long the request waited for it.

    discard: do not hand it out any more, since it has broken; the next request loads it anew.
    """

    model: ModelT
    load_s: float = 0.0
    discard: Callable[[], None] = lambda: None


class ServedModels(Protocol[EntryT]):
    """What a server serves. Plain methods may block, unless they say that they are for the event loop.

    What reads a model's file raises ModelFileError and its kin.
    """

    @property
    def settings(self) -> Settings:
        """Where a library's files are. Raises ApiError 501 where there is none."""

    def entries(self) -> Sequence[EntryT]:
        """All models."""

    def find(self, name: str) -> EntryT:
        """The model of that name, ":latest" or not. Raises ApiError 400 or 404, RemoteError."""

    def library_model(self, entry: EntryT) -> LibraryModel:
        """The model as the library has it. Raises ApiError 501 where there is none."""

    def about(self, entry: EntryT) -> ModelAbout:
        """What lists say of a model."""

    def capabilities(self, entry: EntryT) -> Sequence[str]:
        """What requests may ask of it, in Ollama's words."""

    def ranks(self, entry: EntryT) -> bool:
        """Whether it may be asked to rank documents."""

    def describe(self, entry: EntryT, verbose: bool) -> ModelDescription:
        """Everything about it; verbose adds arrays and tensors. Raises LibraryError too."""

    def lease(
        self, entry: EntryT, keep_alive_s: float | None, listener: LoadListener | None
    ) -> AbstractAsyncContextManager[Lease[ServedModel]]:
        """Hold a model that answers, loading it first where needed. keep_alive_s None is the server's default."""

    def lease_embedder(self, entry: EntryT, keep_alive_s: float | None) -> AbstractAsyncContextManager[Lease[Embedder]]:
        """Hold a model that embeds or ranks."""

    def release(self, entry: EntryT) -> None:
        """Unload a model as soon as no request holds it. On the event loop."""

    async def resident(self) -> list[ResidentModel]:
        """What is in memory, those that stay longest first, and what loads."""

    async def health(self) -> dict[str, Any]:
        """Whether requests can be answered."""

    def engine_stats(self) -> Mapping[str, EngineStats]:
        """Figures of the engines in this process, by model. On the event loop."""

    def stop_loading(self) -> None:
        """Hand out nothing from now on, and end what loads. On the event loop."""

    async def close(self) -> None:
        """Unload everything."""
