"""Looking into the engine of a localllm server, by its own route; other servers have none."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from localllm.remote.connection import Call, Endpoint, RemoteError

if TYPE_CHECKING:
    from localllm.engine.inspection import EngineSnapshot
    from localllm.measure.laboratory import ModelCosts

PATIENCE_S = 10.0


class ServerInspection:
    """Asks a server on a thread of its own, and no more once the server has shown that it has no such route."""

    def __init__(self, endpoint: Endpoint) -> None:
        """endpoint: the server's; its path does not matter."""
        self._endpoint = replace(endpoint, path="")
        self._thread = ThreadPoolExecutor(1, "inspection")
        self._absent = False

    def snapshot(self, model: str) -> "Future[EngineSnapshot] | None":
        """A snapshot, soon; None for a server of another kind. The future raises RemoteError."""
        return None if self._absent else self._thread.submit(self._snapshot, model)

    def costs(self, model: str) -> "ModelCosts | None":
        """The model's costs there; None where they are not known. Raises RemoteError."""
        from localllm.measure.laboratory import ModelCosts

        found = self._ask(model, "&costs=true").get("costs")
        return found and ModelCosts.from_data(found)

    def close(self) -> None:
        """Ask no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _snapshot(self, model: str) -> "EngineSnapshot":
        from localllm.measure.inspection_data import snapshot_of

        try:
            return snapshot_of(self._ask(model)["snapshot"])
        except (KeyError, TypeError, ValueError) as error:
            self._absent = True
            raise RemoteError(f"{self._endpoint} does not show its engine.") from error

    def _ask(self, model: str, more: str = "") -> dict[str, Any]:
        route = f"/api/inspect?model={quote(model, safe='')}{more}"
        try:
            return Call(self._endpoint, "GET", route, patience_s=PATIENCE_S).json()
        except RemoteError as error:
            # localllm answers 404 with a reason while the model is not loaded.
            if error.status == HTTPStatus.NOT_FOUND and "not loaded" not in str(error):
                self._absent = True
            raise
