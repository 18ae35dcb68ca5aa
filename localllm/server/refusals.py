"""One line in the log for each response with an error status: who asked for what, and why it was refused.

It has no text of prompts or answers. What a client chose is shortened, and has no newlines or escapes.
"""

import logging
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.text import harmless, shortened

log = logging.getLogger(__name__)

# The ASGI scope's keys for the request's model and for the reason of a refusal.
MODEL = "localllm.model"
REASON = "localllm.reason"

_SCOPE: ContextVar[Scope] = ContextVar("scope")
"""The current request's."""

LONGEST_NAME = 120
LONGEST_REASON = 300
_LEFT = 499  # the client has closed the connection, so nothing was refused


class RefusalLog:
    """ASGI middleware that logs each response with a status from 400 on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def logged(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and message["status"] != _LEFT:
                log_refusal(message["status"], scope.get(REASON, "no reason is given"))
            await send(message)

        _SCOPE.set(scope)
        await self._app(scope, receive, logged if scope["type"] == "http" else send)


def log_refusal(status: int, reason: str) -> None:
    """Log that the current request is refused, or that its stream ends with an error."""
    scope = _SCOPE.get({})
    agent = next((value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"user-agent"), "")
    route = getattr(scope.get("route"), "path", scope.get("path", ""))
    request = [scope.get("method", ""), route, str(scope.get(MODEL, "")), agent]
    method, route, model, agent = (_plain(text, LONGEST_NAME) or "-" for text in request)
    why = _plain(reason, LONGEST_REASON)
    log.warning("refused: %s %s, status %d, model %s, client %s: %s", method, route, status, model, agent, why)


def _plain(text: str, most: int) -> str:
    """A text on one line."""
    return shortened(harmless(" ".join(text.split())).encode(errors="replace").decode(), most)
