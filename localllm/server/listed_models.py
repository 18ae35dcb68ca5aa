"""A server's own models plus the remote models in its fallback lists, such as http://host:8000#qwen3:8b."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from localllm.answer.event import Prompt
from localllm.answer.request import AnswerRequest
from localllm.engine.engine import EngineStats
from localllm.library.entry import LibraryModel
from localllm.remote.openai import OpenAIModel, OpenAIServer, WithoutTokens
from localllm.server.fallbacks import Fallbacks, is_remote, split_remote
from localllm.server.load_watch import LoadListener
from localllm.server.remote_models import RemoteEntry, RemoteModels
from localllm.server.served import (
    Embedder,
    Lease,
    ModelAbout,
    ModelDescription,
    ServedModel,
    ServedModels,
)
from localllm.settings import Settings


@dataclass(frozen=True, slots=True)
class ListedEntry:
    """A remote server's model under its name in the lists."""

    name: str
    entry: RemoteEntry


@dataclass(frozen=True, slots=True)
class ListedModel(WithoutTokens):
    """A remote model that answers under its name in the lists, which contains the server's address."""

    name: str
    model: OpenAIModel

    @property
    def most_choices(self) -> int:
        return self.model.most_choices

    def prepare(self, request: AnswerRequest) -> Prompt:
        return self.model.prepare(request)


class ListedModels:
    """Implements ServedModels, which documents the methods, over a server's own models and its lists' remote models.

    A request can name a remote model's list, or the model by its name in the list. `entries`, `resident` and `health`
    cover the own models only: no request waits for a server that it does not use.
    """

    def __init__(self, own: ServedModels[Any], remote: Mapping[str, RemoteModels]) -> None:
        """remote: the server that has each remote model, by the model's name in the lists."""
        self._own = own
        self._remote = remote
        self.entries = own.entries
        self.resident = own.resident
        self.health = own.health
        self.loaded = own.loaded
        self.stop_loading = own.stop_loading
        self.close = own.close

    @property
    def settings(self) -> Settings:
        return self._own.settings

    def find(self, name: str) -> Any:
        if name in self._remote:
            _, model = split_remote(name)
            return ListedEntry(name, self._remote[name].find(model))
        return self._own.find(name)

    def library_model(self, entry: Any) -> LibraryModel:
        models, inner = self._place(entry)
        return models.library_model(inner)

    def about(self, entry: Any) -> ModelAbout:
        models, inner = self._place(entry)
        return replace(models.about(inner), name=entry.name)

    def capabilities(self, entry: Any) -> Sequence[str]:
        models, inner = self._place(entry)
        return models.capabilities(inner)

    def ranks(self, entry: Any) -> bool:
        models, inner = self._place(entry)
        return models.ranks(inner)

    def describe(self, entry: Any, verbose: bool) -> ModelDescription:
        models, inner = self._place(entry)
        return models.describe(inner, verbose)

    def lease(
        self, entry: Any, keep_alive_s: float | None, listener: LoadListener | None
    ) -> AbstractAsyncContextManager[Lease[ServedModel]]:
        if isinstance(entry, ListedEntry):
            return nullcontext(Lease(ListedModel(entry.name, entry.entry.model)))
        return self._own.lease(entry, keep_alive_s, listener)

    def lease_embedder(self, entry: Any, keep_alive_s: float | None) -> AbstractAsyncContextManager[Lease[Embedder]]:
        models, inner = self._place(entry)
        return models.lease_embedder(inner, keep_alive_s)

    def release(self, entry: Any) -> None:
        models, inner = self._place(entry)
        models.release(inner)

    def engine_stats(self) -> Mapping[str, EngineStats]:
        return self._own.engine_stats()

    def _place(self, entry: Any) -> tuple[ServedModels[Any], Any]:
        """The collection that has the model, and its entry there."""
        if isinstance(entry, ListedEntry):
            return self._remote[entry.name], entry.entry
        return self._own, entry


def with_listed(own: ServedModels[Any], lists: Fallbacks, settings: Settings, keep_alive_s: float) -> ServedModels[Any]:
    """The models, plus the remote ones that the lists name. All servers are sent the key from the settings.

    Raises SettingsError for a bad key file.
    """
    servers: dict[str, RemoteModels] = {}
    remote: dict[str, RemoteModels] = {}
    for name in {model for models in lists.values() for model in models if is_remote(model)}:
        address, _ = split_remote(name)
        if address not in servers:
            servers[address] = RemoteModels(OpenAIServer.at(address, settings), keep_alive_s)
        remote[name] = servers[address]
    return ListedModels(own, remote) if remote else own
