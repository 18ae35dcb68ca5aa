"""A remote server's models, which are not loaded here: of --remote, or of fallback lists (http://host:8000#qwen3:8b)."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from anyio import to_thread

from localllm.library.entry import LibraryModel
from localllm.library.names import plain
from localllm.placement.loaded_model import LoadedModel
from localllm.remote.connection import RemoteError
from localllm.remote.openai import OpenAIModel, OpenAIServer, unavailable
from localllm.server.errors import ApiError, ModelNotFoundError
from localllm.server.fallbacks import is_remote, split_remote
from localllm.server.limits import MAX_NAME_CHARS
from localllm.server.load_watch import LoadListener
from localllm.server.options import ServerOptions
from localllm.server.served import Embedder, Lease, Resident, ServedDetails, ServedModel, ServedRow
from localllm.settings import Settings

# Clients offer tools only to models that list them, so all do; the remote server refuses what it cannot do.
CAPABILITIES = ("completion", "tools")


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """A model that requests can name."""

    name: str
    model: OpenAIModel


class RemoteModels:
    """A remote server's models, listed again whenever a name is unknown. Thread-safe.

    Implements ServedModels, which documents the methods. Facts that OpenAI's protocol does not report stay empty.
    """

    def __init__(self, server: OpenAIServer, keep_alive_s: float, prefix: str = "") -> None:
        """keep_alive_s: how long a model counts as resident after a request; servers do not report what is loaded.

        prefix: what requests and responses have before the server's own names.
        """
        self._server = server
        self._prefix = prefix
        self._keep_alive_s = keep_alive_s
        self._entries: dict[str, RemoteEntry] = {}  # replaced as a whole, since any thread may read it
        self._used: dict[str, float] = {}  # by name: the time of the last request

    @property
    def settings(self) -> Settings:
        raise ApiError(501, f"the models are on {self._server.endpoint}; add, copy and remove them there")

    def entries(self) -> list[RemoteEntry]:
        found = [RemoteEntry(f"{self._prefix}{model.name}", model) for model in self._server.models()]
        self._entries = {entry.name: entry for entry in found}
        return found

    def names(self) -> list[str]:
        return [entry.name for entry in self.entries()]

    def find(self, name: str) -> RemoteEntry:
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise ApiError(400, "invalid model name" if name else "model is required")
        found = self._known(name)
        if found is None:
            self.entries()
            found = self._known(name)
        if found is None:
            raise ModelNotFoundError(name)
        self._used[found.name] = time.monotonic()
        return found

    def library_model(self, entry: RemoteEntry) -> LibraryModel:
        raise ApiError(501, f"{entry.name} is on {self._server.endpoint}")

    def about(self, entry: RemoteEntry) -> ServedRow:
        return ServedRow(
            name=entry.name,
            created=0,
            modified=datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            digest=hashlib.sha256(f"{self._server.endpoint}\n{entry.name}".encode()).hexdigest(),
            format="remote",
            family="remote",
            context=entry.model.context or 0,
            owner="remote",
        )

    def capabilities(self, _entry: RemoteEntry) -> tuple[str, ...]:
        return CAPABILITIES

    def ranks(self, _entry: RemoteEntry) -> bool:
        return True  # unknown here; the remote server refuses what it cannot do

    def identity(self, entry: RemoteEntry) -> str:
        return self.about(entry).digest

    def adapters(self, _entry: RemoteEntry) -> NoReturn:
        raise unavailable("adapters")

    def set_adapters(self, _entry: RemoteEntry, _chosen: Sequence[tuple[int, float]]) -> NoReturn:
        raise unavailable("adapters")

    def describe(self, entry: RemoteEntry, verbose: bool) -> ServedDetails:
        info: dict[str, Any] = {"general.architecture": "remote", "general.name": entry.name}
        if entry.model.context is not None:
            info["remote.context_length"] = entry.model.context
        return ServedDetails(self.about(entry), CAPABILITIES, info=info)

    def lease(
        self, entry: RemoteEntry, _keep_alive_s: float | None, _listener: LoadListener | None
    ) -> contextlib.AbstractAsyncContextManager[Lease[ServedModel]]:
        return contextlib.nullcontext(Lease(entry.name, entry.model))

    def lease_embedder(
        self, entry: RemoteEntry, _keep_alive_s: float | None
    ) -> contextlib.AbstractAsyncContextManager[Lease[Embedder]]:
        return contextlib.nullcontext(Lease(entry.name, entry.model))

    def release(self, entry: RemoteEntry) -> None:
        """Forget the model's last request, so that it no longer counts as resident."""
        self._used.pop(entry.name, None)

    async def resident(self) -> list[Resident]:
        now = time.monotonic()
        more = {"backend": "remote", "backend_reason": str(self._server.endpoint)}
        rows = []
        for entry in await to_thread.run_sync(self.entries):
            used = self._used.get(entry.name)
            if used is not None and used + self._keep_alive_s > now:
                about = self.about(entry)
                rows.append(Resident(about, used + self._keep_alive_s - now, 0, about.context, more=more))
        return rows

    async def health(self) -> dict[str, Any]:
        """ready: the remote server lists its models; reason: why it does not."""
        state: dict[str, Any] = {"status": "ok", "ready": True, "remote": str(self._server.endpoint)}
        try:
            await to_thread.run_sync(self.entries)
        except RemoteError as error:
            return state | {"ready": False, "reason": str(error)}
        return state

    def loaded(self) -> Mapping[str, LoadedModel]:
        return {}

    def stop_loading(self) -> None:
        """Nothing loads here."""

    async def close(self) -> None:
        """Nothing is held here."""

    def _known(self, name: str) -> RemoteEntry | None:
        found = [entry for one, entry in self._entries.items() if plain(one) == plain(name)]
        return self._entries.get(name) or next(iter(found), None)


def listed_models(options: ServerOptions) -> dict[str, RemoteModels]:
    """The collection of each remote model that fallback lists name. All servers are sent the key from the settings.

    Raises SettingsError for a bad key file.
    """
    servers: dict[str, RemoteModels] = {}
    found = {}
    for name in {model for models in options.fallbacks.values() for model in models if is_remote(model)}:
        address, _ = split_remote(name)
        if address not in servers:
            server = OpenAIServer.at(address, options.settings)
            servers[address] = RemoteModels(server, options.keep_alive_s, f"{address}#")
        found[name] = servers[address]
    return found


def models_at(address: str, options: ServerOptions) -> Callable[[], RemoteModels]:
    """A factory for the models of the server at an address."""
    server = OpenAIServer.at(address, options.settings)
    return lambda: RemoteModels(server, options.keep_alive_s)
