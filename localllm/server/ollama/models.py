"""Listing and describing models, and embeddings."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from anyio import to_thread
from fastapi import APIRouter
from starlette.responses import PlainTextResponse

from localllm.errors import LocalLLMError
from localllm.library.behaviour import Behaviour
from localllm.library.entry import ManifestDefaults
from localllm.server.bodies import Object, keep_alive_s, stop_strings
from localllm.server.embeddings import embed_all
from localllm.server.json_body import ProtocolRoute
from localllm.server.ollama.options import read_options
from localllm.server.ollama.schema import EmbedBody, OllamaEmbeddingsBody, ShowBody
from localllm.server.ollama.wire import NANOSECONDS
from localllm.server.options import FOREVER
from localllm.server.served import Resident, ServedModels, ServedRow
from localllm.server.service import Service, ServiceDep
from localllm.server.wire import load_progress

router = APIRouter(route_class=ProtocolRoute, tags=["Ollama"])


OLLAMA_VERSION = "0.13.5"
_LIST_SECONDS = 2.0  # for reading the capabilities of models in one list; they are cached for the next list
_NEVER = datetime(2318, 1, 1, tzinfo=UTC)  # the expiry of a model that is never unloaded


@router.get("/", response_class=PlainTextResponse)
@router.head("/", include_in_schema=False)
async def root() -> str:
    """The text by which Ollama's clients recognise a server."""
    return "Ollama is running"


@router.get("/api/version")
@router.head("/api/version", include_in_schema=False)
async def server_version() -> dict[str, str]:
    """The version of Ollama whose protocol is spoken, which clients look at, and localllm's own."""
    return {"version": OLLAMA_VERSION, "localllm": version("localllm")}


@router.get("/api/tags")
@router.head("/api/tags", include_in_schema=False)
async def tags(service: ServiceDep) -> Object:
    """List the models that requests may name."""
    return {"models": await to_thread.run_sync(_tags, service)}


@router.post("/api/show")
async def show(body: ShowBody, service: ServiceDep) -> Object:
    """Describe a model."""
    return await to_thread.run_sync(_shown, *await service.find(body.model), body)


@router.get("/api/ps")
@router.head("/api/ps", include_in_schema=False)
async def ps(service: ServiceDep) -> Object:
    """List the loaded models, those that stay longest first, then the loading ones."""
    return {"models": [_resident(model) for model in await service.models.resident()]}


@router.post("/api/embed")
async def embed(body: EmbedBody, service: ServiceDep) -> Object:
    """Embed texts as normalised vectors."""
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    began = time.monotonic()
    async with service.lease_embedder(body.model, keep_alive_s(body.keep_alive)) as lease:
        rows, tokens = [], 0
        if texts:
            truncate = body.truncate is not False
            found, tokens = await embed_all(lease.model, texts, truncate=truncate, dimensions=body.dimensions or None)
            rows = found.tolist()
    return {
        "model": body.model,
        "embeddings": rows,
        "total_duration": round((time.monotonic() - began) * NANOSECONDS),
        "load_duration": round(lease.load_s * NANOSECONDS),
        "prompt_eval_count": tokens,
    }


@router.post("/api/embeddings")
async def embeddings(body: OllamaEmbeddingsBody, service: ServiceDep) -> Object:
    """Embed one text: the older form. An empty text loads the model."""
    newer = EmbedBody(model=body.model, keep_alive=body.keep_alive, input=[body.prompt] if body.prompt else [])
    answer = await embed(newer, service)
    return {"embedding": answer["embeddings"][0] if answer["embeddings"] else []}


def _tags(service: Service) -> list[Object]:
    """All models. Capabilities need each file's template compiled, so a first list may omit some."""
    listed = service.listed()
    patience_ends = time.monotonic() + _LIST_SECONDS
    rows = []
    for models, entry, about in listed:
        row = _row(about)
        if time.monotonic() < patience_ends:
            with contextlib.suppress(OSError, LocalLLMError):  # a request for this model reports the error
                row["capabilities"] = list(models.capabilities(entry))
        rows.append(row)
    return rows


def _row(about: ServedRow) -> Object:
    return {
        "name": about.name,
        "model": about.name,
        "modified_at": about.modified,
        "size": about.size,
        "digest": about.digest,
        "details": _details(about),
    }


def _details(about: ServedRow) -> Object:
    return {
        "parent_model": "",
        "format": about.format,
        "family": about.family,
        "families": [about.family],
        "parameter_size": about.parameters,
        "quantization_level": about.quantization,
        "context_length": about.context,
        "embedding_length": about.width,
    }


def _resident(model: Resident) -> Object:
    left = model.seconds_left
    never = left == FOREVER or left > timedelta.max.total_seconds() / 10**4
    expires = _NEVER if never else datetime.now(UTC) + timedelta(seconds=left)
    row = _row(model.about)
    del row["modified_at"]
    loading = {} if model.loading is None else {"loading": load_progress(model.loading)}
    return row | {
        "size": model.size,
        "expires_at": expires.isoformat().replace("+00:00", "Z"),
        "size_vram": model.device_bytes,
        "context_length": model.context,
        **loading,
        **model.more,
    }


def _shown(models: ServedModels, entry: Any, body: ShowBody) -> Object:
    """The response of /api/show.

    Raises ModelFileError or another file error, LibraryError for a bad manifest, ApiError 400 for bad options.
    """
    found = models.describe(entry, bool(body.verbose))
    behaviour = replace(found.behaviour, system=body.system or found.behaviour.system)
    parameters = _parameters(behaviour, body.options or {})
    optional: Object = {
        "license": "\n".join(found.defaults.licenses),
        "system": behaviour.system,
        "messages": list(behaviour.messages),
        "projector_info": found.projector_info,
    }
    return {
        "modelfile": _modelfile(found.about.name, behaviour, found.defaults, parameters),
        "parameters": "\n".join(parameters),
        "template": found.template or "{{ .Prompt }}",
        **{name: value for name, value in optional.items() if value},
        "details": _details(found.about),
        "model_info": found.info,
        "tensors": found.tensors or [],
        "capabilities": list(found.capabilities),
        "modified_at": found.about.modified,
    }


def _modelfile(name: str, behaviour: Behaviour, defaults: ManifestDefaults, parameters: Sequence[str]) -> str:
    """A Modelfile from which `create` would make the same model."""
    lines = [f"FROM {name}"]
    if defaults.template:
        lines.append(f'TEMPLATE """{defaults.template}"""')
    lines += [f"PARAMETER {line}" for line in parameters]
    lines += [f"ADAPTER {Path(path).name}" for path in defaults.adapters]
    if behaviour.system:
        lines.append(f'SYSTEM """{behaviour.system}"""')
    lines += [f'MESSAGE {message["role"]} """{message["content"]}"""' for message in behaviour.messages]
    lines += [f'LICENSE """{text}"""' for text in defaults.licenses]
    return "".join(f"{line}\n" for line in lines)


def _parameters(behaviour: Behaviour, options: Mapping[str, Any]) -> list[str]:
    """The manifest's parameters, overridden by options, as lines of a Modelfile. Raises ApiError 400."""
    read_options(options)
    values = behaviour.parameters | {name: value for name, value in options.items() if name != "stop"}
    stops = stop_strings(options["stop"]) if "stop" in options else behaviour.stop
    lines = [f"{name} {value}" for name, value in sorted(values.items())]
    return [*lines, *(f"stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops)]
