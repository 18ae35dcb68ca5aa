"""Routes for operating the server: /health, /health/ready, /metrics, /api/inspect and /docs.

/docs is a static page of our own: FastAPI's pages load scripts from a CDN.
"""

import asyncio
from collections.abc import Iterator
from html import escape
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, JSONResponse

from localllm.answer.request import AnswerRequest
from localllm.answer.tool_calls.call import Schema
from localllm.engine.disk_cache import stored_prefixes
from localllm.engine.inspection_data import snapshot_data
from localllm.server.errors import ApiError
from localllm.server.service import ServiceDep
from localllm.speed.expected import expected_prompt_s
from localllm.wings.lab.laboratory import costs_of

router = APIRouter(tags=["Operation"])


# Any generated token shows that the model works.
_PROBE = AnswerRequest(prompt="Hello", max_tokens=1, ignore_eos=True)

_POLICY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
:root { color-scheme: light dark }
code, h3 { font-family: ui-monospace, monospace; font-weight: normal } h3 { margin: 1.2em 0 0 } p { margin: .2em 0 }
table { border-collapse: collapse } td, th { text-align: left; vertical-align: top; padding: .1em 1.5em .1em 0 }"""
_BOUNDS = (
    ("minimum", "at least"),
    ("maximum", "at most"),
    ("minLength", "characters, at least"),
    ("maxLength", "characters, at most"),
    ("minItems", "entries, at least"),
    ("maxItems", "entries, at most"),
)


@router.head("/health", include_in_schema=False)
@router.head("/v1/health", include_in_schema=False)
@router.get("/health")
@router.get("/v1/health")
async def health(service: ServiceDep) -> dict[str, Any]:
    """Liveness (status) and readiness (ready: a token has been computed, or the remote server answers)."""
    return await service.models.health()


@router.get("/health/ready")
async def ready(service: ServiceDep, model: str | None = None) -> JSONResponse:
    """Readiness: 200, or 503 while no token has been computed. model: load this one, and compute one, if need be."""
    if model is not None:
        _, entry = await service.find(model)
        loaded = service.models.loaded().get(entry.name)
        if loaded is None or not loaded.engine.stats().generated_tokens:
            async with service.run(model, [_PROBE]) as run:
                await run.finish()
    state = await service.models.health()
    return JSONResponse(state, 200 if state["ready"] else 503)


@router.get("/metrics")
async def metrics(service: ServiceDep) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/api/inspect")
async def inspect(
    service: ServiceDep, model: str, costs: bool = False, prompt: Annotated[int | None, Query(ge=1)] = None
) -> dict[str, Any]:
    """A look inside the engine of a loaded model: its last steps, requests' timelines, prefixes and pages; no text.

    costs: the model's sizes and the machine's limits instead, by which steps can be predicted; null where unknown.
    prompt: the seconds that a prompt of so many tokens should take here instead, null if unknown, and the shared
    prefixes on disk: tokens, and the last use in seconds since 1970.
    """
    _, entry = await service.find(model)
    loaded = service.models.loaded().get(entry.name)
    if loaded is None:
        raise ApiError(404, f"model '{entry.name}' is not loaded in this process")
    if costs:
        settings = service.models.settings
        found = await to_thread.run_sync(costs_of, loaded.file, settings.kv_types, settings.threads)
        return {"costs": found and found.as_data()}
    if prompt is not None:
        threads = service.models.settings.threads
        seconds = await to_thread.run_sync(expected_prompt_s, loaded.file, prompt, threads)
        prefixes = await to_thread.run_sync(stored_prefixes, loaded.file.path)
        return {"seconds": seconds, "shared_prefixes": [{"tokens": one.tokens, "used": one.used} for one in prefixes]}
    return {"snapshot": snapshot_data(await asyncio.wrap_future(loaded.engine.inspect()))}


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """This API as a page; /openapi.json has it for programs."""
    return HTMLResponse(page(request.app.openapi()), headers=_POLICY)


def page(described: Schema) -> str:
    """An OpenAPI description as HTML: routes by tag, then their bodies."""
    info = described["info"]
    groups: dict[str, list[str]] = {}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            groups.setdefault(operation["tags"][0], []).append("".join(_route(path, method, operation)))
    routes = "".join(f"<h2>{escape(tag)}</h2>{''.join(shown)}" for tag, shown in groups.items())
    bodies = "".join(_body(name, schema) for name, schema in described["components"]["schemas"].items())
    title = escape(f"{info['title']} {info['version']}")
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{routes}<h2>Bodies</h2>{bodies}</html>"
    )


def _route(path: str, method: str, operation: Schema) -> Iterator[str]:
    yield f"<h3>{method.upper()} {escape(path)}</h3><p>{escape(operation['description'])}</p>"
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield f"<p>Body: {_type(content['schema'])}</p>"


def _body(name: str, schema: Schema) -> str:
    needed = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code><td>{_type(about)}{_bounds(about)}<td>{_default(about, field in needed)}"
        for field, about in schema.get("properties", {}).items()
    )
    text = escape(schema.get("description", ""))
    return f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{text}</p><table>{rows}</table>'


def _type(schema: Schema) -> str:
    """A value's type in words, with links to bodies."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if choices := schema.get("anyOf"):
        return " or ".join(f"{_type(choice)}{_bounds(choice)}" for choice in choices)
    if "enum" in schema or "const" in schema:
        return escape(", ".join(repr(value) for value in schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(schema.get("type", "anything"))


def _bounds(schema: Schema) -> str:
    found = [f"{words} {schema[name]:,}" for name, words in _BOUNDS if name in schema]
    return escape(f" ({', '.join(found)})") if found else ""


def _default(schema: Schema, needed: bool) -> str:
    if needed:
        return "required"
    default = schema.get("default")
    return "" if default is None else f"<code>{escape(repr(default))}</code>"
