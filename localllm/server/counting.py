"""Counts requests by route and status."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.server.metrics import Metrics


class Counting:
    """ASGI middleware. The route's pattern is counted, never the path itself, which anybody may make up."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and note the status."""

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, noted if scope["type"] == "http" else send)
