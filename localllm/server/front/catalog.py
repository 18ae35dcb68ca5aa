"""The models of a server elsewhere, under the names that it has for them."""

import threading
import time
from dataclasses import dataclass, field

from localllm.library.behaviour import Behaviour
from localllm.remote.errors import RemoteError
from localllm.remote.server import RemoteModel, RemoteServer
from localllm.server.errors import ApiError, ModelNotFoundError
from localllm.server.front.model import ForeignEmbedder, ForeignModel
from localllm.server.limits import MAX_NAME_CHARS
from localllm.settings import Settings

# A list of models comes at once, or the server is stuck.
PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class ForeignEntry:
    """A model that can be asked for, and both of its ways to answer.

    used holds when it was asked for last, on time.monotonic's clock, if ever.
    """

    name: str
    context: int | None
    model: ForeignModel
    embedder: ForeignEmbedder
    behaviour: Behaviour = field(default_factory=Behaviour)
    used: list[float] = field(default_factory=list)

    def note_use(self) -> None:
        """Remember that it was asked for now."""
        self.used[:] = [time.monotonic()]

    def forget(self) -> None:
        """Take it for one that nobody has asked for."""
        self.used.clear()


@dataclass(frozen=True, slots=True)
class ForeignLease:
    """Stands for the hold on a loaded model. Nothing is loaded here, and nothing waited for."""

    model: ForeignModel | ForeignEmbedder
    load_s: float = 0.0


class ForeignCatalog:
    """What the server offers, asked again where a name is unknown. Thread-safe; methods may wait for the server."""

    def __init__(self, server: RemoteServer) -> None:
        self.server = server
        self._lock = threading.Lock()
        self._entries: dict[str, ForeignEntry] = {}

    @property
    def settings(self) -> Settings:
        """Where a library's files are; there is none. Raises ApiError 501."""
        raise ApiError(501, f"models are kept by {self.server.endpoint}; add, copy and remove them there")

    def entries(self) -> list[ForeignEntry]:
        """All models. Raises RemoteError."""
        offered = self.server.models(PATIENCE_S)
        with self._lock:
            self._entries = {model.name: self._entry(model) for model in offered}
            return list(self._entries.values())

    def find(self, name: str) -> ForeignEntry:
        """The model of that name, ":latest" or not. Raises ApiError 400 or 404, RemoteError."""
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise ApiError(400, "invalid model name" if name else "model is required")
        found = self._known(name)
        if found is None:
            self.entries()
            found = self._known(name)
        if found is None:
            raise ModelNotFoundError(name)
        found.note_use()
        return found

    def trouble(self) -> str | None:
        """Why the server cannot answer now, or None."""
        try:
            self.entries()
        except RemoteError as error:
            return str(error)
        return None

    def _known(self, name: str) -> ForeignEntry | None:
        plain = name.removesuffix(":latest")
        with self._lock:
            return next((self._entries[one] for one in (name, plain, f"{plain}:latest") if one in self._entries), None)

    def _entry(self, model: RemoteModel) -> ForeignEntry:
        known = self._entries.get(model.name)
        if known and known.context == model.context:
            return known
        foreign = ForeignModel(self.server, model.name, model.fills_in)
        return ForeignEntry(model.name, model.context, foreign, ForeignEmbedder(self.server, model.name))
