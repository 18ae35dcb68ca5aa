"""The chat's backends for servers that speak Ollama's protocol, such as localllm's, or OpenAI's.

A localllm server's engine can be inspected through a separate route.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from localllm.answer.event import AnsweringModel, AnswerStream
from localllm.answer.placeholders import has_images
from localllm.answer.request import AnswerRequest
from localllm.engine.request import Counts
from localllm.errors import RequestError
from localllm.remote.connection import Endpoint, RemoteCall, RemoteError, is_local
from localllm.remote.ollama import OllamaModel, OllamaServer
from localllm.remote.openai import OpenAIServer
from tui.backend import LoadedInfo, PickerRow, short_name

if TYPE_CHECKING:
    from gguf_io.media import View
    from gguf_io.runner_info import LoadProgress
    from localllm.engine.inspection import EngineSnapshot
    from localllm.library.modelfile import Modelfile
    from tui.laboratory import Laboratory

PATIENCE_S = 10.0

Told = TypeVar("Told")

# How servers respond to a route that they lack, and to one whose fields they name differently.
_NO_ROUTE = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED})
_OTHER_FIELDS = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY})


class ServerBackend:
    """The common base of both backends. Thread-safe; see Backend for the methods."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._model: AnsweringModel | None = None
        self._info: LoadedInfo | None = None
        self._root = replace(endpoint, path="")
        self._tokenizes = is_local(endpoint.host)  # False once the server has rejected /tokenize
        self._inspects = True  # False once the server turns out to lack /api/inspect
        self._inspector = ThreadPoolExecutor(1, "inspection")

    @property
    def info(self) -> LoadedInfo | None:
        return self._info

    def submit(self, request: AnswerRequest) -> AnswerStream:
        if self._model is None:
            raise RequestError("No model is chosen. Choose one with /load.")
        return self._model.prepare(request).submit()

    def count_tokens(self, text: str) -> int | None:
        """Counted by the server's /tokenize, which localllm and llama.cpp offer but neither protocol requires.

        None if the route is missing, and for a server on another machine: a draft stays on this one until it is sent.
        """
        if self._info is None or not self._tokenizes:
            return None
        body = {"model": self._info.name, "content": text}
        try:
            tokens = RemoteCall(self._root, "POST", "/tokenize", body, PATIENCE_S).json().get("tokens")
        except RemoteError as error:
            self._tokenizes = error.status not in _NO_ROUTE | _OTHER_FIELDS
            return None
        self._tokenizes = isinstance(tokens, list)
        return len(tokens) if isinstance(tokens, list) else None

    def see_picture(self, data: bytes, least: int | None = None, most: int | None = None) -> "View | None":
        """Always None. Raises RequestError if the model reads text only."""
        if self._info and not self._info.sees:
            raise RequestError(
                f"{short_name(self._info.name)} reads text only. Choose a model that reads pictures: /models."
            )
        return None

    def expected_counts(self, request: AnswerRequest) -> Counts | None:
        """Always None."""
        return None

    def inspect(self) -> "Future[EngineSnapshot] | None":
        """None if the server lacks the route, which only localllm's has. The future raises RemoteError."""
        return self._inspector.submit(self._snapshot, self._info.name) if self._info and self._inspects else None

    def laboratory(self) -> "Laboratory | None":
        from tui.laboratory import Laboratory

        def read(told: dict[str, Any]) -> Laboratory | None:
            return Laboratory.of_data(told["costs"]) if told.get("costs") else None

        return self._ask_engine(self._info.name, read, "&costs=true") if self._info else None

    def memory_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        self._inspector.shutdown(wait=False, cancel_futures=True)

    def _snapshot(self, model: str) -> "EngineSnapshot":
        from localllm.engine.inspection_data import snapshot_of

        return self._ask_engine(model, lambda told: snapshot_of(told["snapshot"]))

    def _ask_engine(self, model: str, read: Callable[[dict[str, Any]], Told], more: str = "") -> Told:
        """What `read` finds in the server's response. Raises RemoteError, also if it is not what localllm sends."""
        route = f"/api/inspect?model={quote(model, safe='')}{more}"
        try:
            return read(RemoteCall(self._root, "GET", route, patience_s=PATIENCE_S).json())
        except RemoteError as error:
            # localllm answers 404 with a reason while the model is not loaded.
            if error.status == HTTPStatus.NOT_FOUND and "not loaded" not in str(error):
                self._inspects = False
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._inspects = False
            raise RemoteError(f"{self._root} does not show its engine.") from error


class OllamaBackend(ServerBackend):
    """Models on a server that speaks Ollama's protocol."""

    def __init__(self, server: OllamaServer) -> None:
        super().__init__(server.endpoint)
        self._server = server
        self._prices = is_local(server.endpoint.host)  # False once the server turns out to lack /api/cost

    def load(self, name: str, progress: "LoadProgress", pull: bool = True) -> LoadedInfo:
        """The server loads the model; pull is ignored."""
        model = self._server.load(name, progress)
        endpoint = self._server.endpoint
        self._model = model
        self._info = info = LoadedInfo(
            name=name,
            place=f"{endpoint.host}:{endpoint.port}",
            context=model.context,
            sees=not {"vision", "audio"}.isdisjoint(model.capabilities),
        )
        return info

    def expected_counts(self, request: AnswerRequest) -> Counts | None:
        """What localllm's /api/cost tells; None if the route is missing, and as for `count_tokens` and pictures."""
        if not isinstance(self._model, OllamaModel) or not self._prices or has_images(request.messages):
            return None
        body = self._model.prepare(request).body
        try:
            told = RemoteCall(self._root, "POST", "/api/cost", body, PATIENCE_S).json()
            return Counts(told["prompt_eval_count"], told["prompt_eval_cached_count"])
        except KeyError:
            self._prices = False
        except RemoteError as error:
            self._prices = error.status not in _NO_ROUTE or "not loaded" in str(error)
        return None

    def models(self, near: str | None) -> Sequence[PickerRow]:
        return [
            PickerRow(
                name=row["name"],
                size=row.get("size"),
                quantization=row.get("details", {}).get("quantization_level", ""),
                parameters=row.get("details", {}).get("parameter_size", ""),
                loaded=loaded,
            )
            for row, loaded in self._server.models()
        ]

    def save(self, name: str, recipe: "Modelfile") -> None:
        """Creates the model on the server."""
        if self._info is None:
            raise RequestError("No model is chosen. Choose one with /load.")
        given = {"system": recipe.system, "parameters": recipe.parameters, "messages": recipe.messages}
        set_fields = {key: value for key, value in given.items() if value}
        self._server.create(name, {"from": self._info.name, **set_fields})


class OpenAIBackend(ServerBackend):
    """Models on a server that speaks OpenAI's protocol."""

    def __init__(self, server: OpenAIServer) -> None:
        super().__init__(server.endpoint)
        self._server = server

    def load(self, name: str, progress: "LoadProgress", pull: bool = True) -> LoadedInfo:
        """Only selects the model; the server loads its models itself."""
        endpoint = self._server.endpoint
        progress(f"asking {endpoint}", 0.0)
        offered = self._server.models()
        found = next((model for model in offered if model.name == name), None)
        if found is None:
            names = ", ".join(model.name for model in offered) or "none"
            raise RemoteError(f"{endpoint} has no model {name!r}. It has: {names}.")
        self._model = found
        self._info = info = LoadedInfo(name=name, place=str(endpoint), context=found.context)
        return info

    def models(self, near: str | None) -> Sequence[PickerRow]:
        present = self._info.name if self._info else None
        return [
            PickerRow(name=model.name, context=model.context, loaded=model.name == present)
            for model in self._server.models()
        ]

    def save(self, name: str, recipe: "Modelfile") -> None:
        """Not supported by the protocol."""
        raise RequestError("This server cannot create models. The chat itself is saved: F3 lists it.")
