"""Request bodies as JSON, whatever their content type says: `curl -d` calls it a form."""

import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn

from anyio import to_thread
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from localllm.server.limits import MAX_JSON_DEPTH

# Larger bodies are parsed on another thread, so that nobody else waits.
INLINE_BYTES = 64 * 1024

_TOO_DEEP = f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels"


def parse_json(body: bytes) -> Any:
    """Parse strict JSON in UTF-8, at most MAX_JSON_DEPTH levels deep. Raises ValueError saying what is wrong."""
    try:
        parsed = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    _check_depth(parsed)
    return parsed


def _check_depth(parsed: Any) -> None:
    level = [parsed]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [child for node in level if isinstance(node, dict | list) for child in _children(node)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _children(node: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            return await to_thread.run_sync(parse_json, body) if len(body) > INLINE_BYTES else parse_json(body)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error


class JsonRoute(APIRoute):
    """A route whose body is JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Have the body parsed by parse_json."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            headers = [header for header in request.scope["headers"] if header[0] != b"content-type"]
            request.scope["headers"] = [*headers, (b"content-type", b"application/json")]
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle
