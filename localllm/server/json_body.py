"""Protocol routes: bodies are parsed as JSON whatever their content type, since `curl -d` sends a form's."""

import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn

from anyio import to_thread
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from localllm.bounded_json import TOO_DEEP, levels
from localllm.server.bodies import IGNORED
from localllm.server.contents import READING, ImageReading
from localllm.server.errors import TOO_LONG_OLLAMA, Refusal
from localllm.server.files import READ
from localllm.server.limits import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_KEYS,
    MAX_JSON_MEMBERS,
    MAX_JSON_VALUES,
)
from localllm.server.refusals import MODEL
from localllm.server.security import UPLOADS
from localllm.server.streams import connected

# Larger bodies are parsed on another thread, so that they do not block the event loop.
INLINE_BYTES = 64 * 1024

# A string, terminated or not. Matches in linear time on any input.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)

_SHOULD_BE = "Input should be "


def parse_json(body: bytes) -> Any:
    """Parse strict UTF-8 JSON of bounded depth and size. Raises ValueError saying what is wrong."""
    _check_size(body)
    try:
        parsed = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except _NoConstantError:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    except ValueError as error:  # Python's limit on the digits of an integer
        raise ValueError("the body holds a number of too many digits") from error
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    if any(len(node) > MAX_JSON_KEYS for level in levels(parsed) for node in level if isinstance(node, dict)):
        raise ValueError(f"an object in the JSON has more than {MAX_JSON_KEYS:,} keys")
    return parsed


def _check_size(body: bytes) -> None:
    """Raise ValueError for a body with too many values, containers or keys.

    Runs before parsing, which blocks all threads. Brackets, commas and colons inside strings do not count.
    """
    if _is_too_large(body) and _is_too_large(_STRING.sub(b"", body)):
        raise ValueError(
            f"the JSON has more than {MAX_JSON_VALUES:,} values, {MAX_JSON_CONTAINERS:,} lists and objects, "
            f"or {MAX_JSON_MEMBERS:,} keys"
        )


def _is_too_large(body: bytes) -> bool:
    containers = body.count(b"[") + body.count(b"{")
    return (
        containers > MAX_JSON_CONTAINERS
        or body.count(b",") + containers > MAX_JSON_VALUES
        or body.count(b":") > MAX_JSON_MEMBERS
    )


class _NoConstantError(ValueError):
    """NaN or infinity, which Python parses but JSON does not have."""


def _no_constant(name: str) -> NoReturn:
    raise _NoConstantError(f"{name} is not JSON")


def what_is_wrong(faults: Sequence[Mapping[str, Any]], body: Any) -> str:
    """Say which field of a body is wrong and what it must be, without quoting the body.

    faults: pydantic's errors. A field of several possible types has one for each; the deepest ones are reported.
    """
    if faults[0]["loc"] == ("body",):
        return "missing request body; send a JSON object" if body is None else "the body must be a JSON object"
    located = [(_place(fault, body), str(fault["msg"])) for fault in faults]
    first, _ = located[0]
    alike = [(place, words) for place, words in located if place[: len(first)] == first]
    deepest = max(alike, key=lambda found: len(found[0]))[0]
    words = dict.fromkeys(words.removeprefix(_SHOULD_BE) for place, words in alike if place == deepest)
    begin = _SHOULD_BE if any(fault["msg"].startswith(_SHOULD_BE) for fault in faults[:1]) else ""
    return f"{'.'.join(map(str, deepest))}: {begin}{' or '.join(words)}"


def _place(fault: Mapping[str, Any], body: Any) -> tuple[int | str, ...]:
    """The path of a fault in the body. pydantic's `loc` also contains type names."""
    place: list[int | str] = []
    steps = fault["loc"][1:]
    for step in steps:
        if (isinstance(body, dict) and step in body) or (isinstance(body, list) and step in range(len(body))):
            body = body[step]
        elif not (fault["type"] == "missing" and step is steps[-1]):
            continue
        place.append(step)
    return tuple(place or steps[:1])


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            parsed = await to_thread.run_sync(parse_json, body) if len(body) > INLINE_BYTES else parse_json(body)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        if isinstance(parsed, dict) and isinstance(model := parsed.get("model"), str):
            self.scope[MODEL] = model
        return parsed


class ProtocolRoute(APIRoute):
    """A route of one protocol: its body is JSON, and its errors have the protocol's format."""

    @staticmethod
    def error_body(refusal: Refusal) -> dict[str, Any]:
        """An error's JSON, as a response or within a stream. This is Ollama's format."""
        return {"error": refusal.worded(TOO_LONG_OLLAMA)}

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Parse the body by parse_json, and cancel the work if the client leaves."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            headers = [header for header in request.scope["headers"] if header[0] != b"content-type"]
            request.scope["headers"] = [*headers, (b"content-type", b"application/json")]
            request = _JsonRequest(request.scope, request.receive)
            if self.path.startswith(UPLOADS):  # the route receives its body itself
                return await handler(request)
            IGNORED.set([])
            READ.set([])
            READING.set(ImageReading(request.app.state.service.options.settings.fetch_images))
            await request.body()  # any message received after the body means that the client has left
            return await connected(request, handler(request))

        return handle
