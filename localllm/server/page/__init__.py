"""The page at /: a chat for browsers. Its files are static and contain no secrets; all else comes from the API.

Ollama's clients know a server by the text at /, so only requests that ask for HTML get the page.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from gguf_io.system import read_file
from localllm.server.errors import ApiError

FOLDER = "/page/"
_TYPES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "app.webmanifest": "application/manifest+json",
}
# Nothing is loaded from elsewhere, no script or style stands in the page, and no other page may frame it. A model's
# text is rendered on the server and is never HTML of its own; this is the second line of defence.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def is_page(path: str, method: str, headers: Mapping[bytes, str]) -> bool:
    """Whether a request is for a file of the page, which needs no API key: the page asks for it."""
    wants_page = path == "/" and "text/html" in headers.get(b"accept", "")
    return method in ("GET", "HEAD") and (path.startswith(FOLDER) or wants_page)


class _PageRoute(APIRoute):
    """The route of the page: only for requests that ask for HTML."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See starlette's Route. Other requests for / do not match."""
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        meant = is_page(scope["path"], scope.get("method", ""), headers)
        return super().matches(scope) if meant else (Match.NONE, {})


router = APIRouter(route_class=_PageRoute, include_in_schema=False)


@router.get("/")
@router.head("/")
async def page(request: Request) -> Response:
    """The chat."""
    return _file("page.html", request)


@router.get(FOLDER + "{name}")
@router.head(FOLDER + "{name}")
async def page_file(name: str, request: Request) -> Response:
    """A file of the page."""
    if name not in _TYPES:
        raise ApiError(404, "there is no such file")
    return _file(name, request)


def _file(name: str, request: Request) -> Response:
    content, tag = _content(name)
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_TYPES[name], headers=headers)


@cache
def _content(name: str) -> tuple[bytes, str]:
    """A file and its entity tag."""
    content = read_file(Path(__file__).with_name(name)).replace(b"{version}", version("localllm").encode())
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'
