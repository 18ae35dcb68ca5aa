"""The interface to the models that a server serves, run by an engine in this process or by a remote server."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from localllm.answer.event import AnsweringModel
from localllm.library.behaviour import Behaviour
from localllm.library.entry import LibraryModel, ManifestDefaults
from localllm.server.load_watch import LoadListener, LoadState
from localllm.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gguf_io.chat_template import ChatTemplate
    from gguf_io.tokenizer import Tokenizer
    from localllm.placement.loaded_model import LoadedModel


class ServedModel(AnsweringModel, Protocol):
    """A model that answers. tokenizer and template raise RemoteError 501 if it is on a remote server."""

    @property
    def tokenizer(self) -> "Tokenizer": ...

    @property
    def template(self) -> "ChatTemplate": ...


class Embedder(Protocol):
    """An embedding model or reranker. Its methods block, with checkpoints where they compute here."""

    def embed(
        self, texts: Sequence[str | Sequence[int]], *, truncate: bool, dimensions: int | None
    ) -> "tuple[NDArray[np.float32], int]":
        """Embed texts: normalised rows, float32[len(texts), dimensions], and the number of tokens.

        dimensions keeps the first numbers of each row; None keeps all. truncate: cut long texts instead of refusing.
        """

    def rank(self, query: str, documents: Sequence[str], *, truncate: bool) -> "tuple[NDArray[np.float32], int]":
        """Score each document for the query, higher is better; returns the scores and the number of tokens."""


ModelT = TypeVar("ModelT")


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A model's row in lists. size: bytes; context: tokens; 0 and "" are unknown.

    created: seconds since the epoch; modified: RFC 3339. digest: 64 hex digits that identify the content. adapters:
    names of its LoRA adapters. parent: the model of which this one is an adapter.
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
    adapters: tuple[str, ...] = ()
    parent: str = ""


@dataclass(frozen=True, slots=True)
class ServedDetails:
    """Everything known about a model. info: its file's metadata; projector_info: its image projector's."""

    about: ServedRow
    capabilities: Sequence[str]
    template: str = ""
    behaviour: Behaviour = field(default_factory=Behaviour)
    defaults: ManifestDefaults = field(default_factory=ManifestDefaults)
    info: Mapping[str, Any] = field(default_factory=dict)
    projector_info: Mapping[str, Any] | None = None
    tensors: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is loaded or loading. Sizes are bytes; seconds_left may be infinite.

    more: further fields for clients, by name.
    """

    about: ServedRow
    seconds_left: float
    size: int
    context: int
    device_bytes: int = 0
    loading: LoadState | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lease(Generic[ModelT]):
    """A model that stays loaded while the lease is held. name: its entry's. load_s: how long the request waited for it.

    discard: stop leasing this broken model; the next request loads it again.
    """

    name: str
    model: ModelT
    load_s: float = 0.0
    discard: Callable[[], None] = lambda: None


class ServedModels(Protocol):
    """The models of a server. Plain methods may block, unless they say that they are for the event loop.

    An entry is a model that requests can name, of a class of the implementation; it has a `name`. Methods that read a
    model's file raise ModelFileError or another file error.
    """

    @property
    def settings(self) -> Settings:
        """The settings of this machine's library. Raises ApiError 501 if the models are remote."""

    def entries(self) -> Sequence[Any]:
        """All models, but for those whose files cannot be read."""

    def names(self) -> Sequence[str]:
        """The names of all models."""

    def find(self, name: str) -> Any:
        """Find a model by name; ":latest" is optional. Raises ApiError 400 or 404, RemoteError."""

    def library_model(self, entry: Any) -> LibraryModel:
        """The model's library entry. Raises ApiError 501 if the models are remote."""

    def about(self, entry: Any) -> ServedRow:
        """A model's row in lists."""

    def capabilities(self, entry: Any) -> Sequence[str]:
        """What the model can do, in Ollama's terms."""

    def ranks(self, entry: Any) -> bool:
        """Whether requests may rank documents with it."""

    def identity(self, entry: Any) -> str:
        """What the model's answers depend on besides the request: its content, its manifest, its adapters."""

    def adapters(self, entry: Any) -> Sequence[tuple[Path, float]]:
        """The LoRA adapters by number, each with its weight for requests that choose none.

        Raises RemoteError 501 if the models are remote, and RequestError for a missing file.
        """

    def set_adapters(self, entry: Any, chosen: Sequence[tuple[int, float]]) -> None:
        """Change these weights until the server ends; adapters that are left out get 0. Raises as `adapters` does.

        Also raises RequestError for unknown numbers and weights out of range.
        """

    def describe(self, entry: Any, verbose: bool) -> ServedDetails:
        """Describe the model; verbose adds arrays and tensors. Also raises LibraryError."""

    def lease(
        self, entry: Any, keep_alive_s: float | None, listener: LoadListener | None
    ) -> AbstractAsyncContextManager[Lease[ServedModel]]:
        """Hold a generating model, loading it first if needed. keep_alive_s: None is the server's default."""

    def lease_embedder(self, entry: Any, keep_alive_s: float | None) -> AbstractAsyncContextManager[Lease[Embedder]]:
        """Hold an embedding model or reranker."""

    def release(self, entry: Any) -> None:
        """Unload a model as soon as no request uses it. On the event loop."""

    async def resident(self) -> list[Resident]:
        """The loaded models, those that stay longest first, then the loading ones."""

    async def health(self) -> dict[str, Any]:
        """The fields of /health."""

    def loaded(self) -> "Mapping[str, LoadedModel]":
        """The generating models that are loaded in this process, by name. On the event loop."""

    def stop_loading(self) -> None:
        """Stop all loads and grant no more leases. On the event loop."""

    async def close(self) -> None:
        """Unload everything."""
