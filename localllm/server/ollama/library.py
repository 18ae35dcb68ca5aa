"""The library over HTTP: pull, create, copy, delete, and blobs for create. Requests name models, never paths."""

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from gguf_io.model_file import MAX_PARTS
from localllm.files import sync_folder
from localllm.library.create import create, uploaded_model
from localllm.library.entry import LibraryModel, Source
from localllm.library.errors import LibraryError, ModelNotFoundError
from localllm.library.go_templates import is_jinja
from localllm.library.lookup import find, is_path
from localllm.library.manifest import Layer, blob_name, check_digest
from localllm.library.modelfile import PARAMETERS, Modelfile
from localllm.library.names import HUGGING_FACE_HOST, OLLAMA_HOST, ModelName
from localllm.library.own_store import OwnStore, free_bytes
from localllm.library.places import own_store
from localllm.library.pull import SPARE_BYTES, PullProgress, PullStatus, pull
from localllm.quality.quantize import TYPES, quantized_model
from localllm.server import errors
from localllm.server.catalog import CatalogEntry, check_name, facts_of
from localllm.server.errors import ApiError
from localllm.server.json_body import JsonRoute
from localllm.server.limits import BODY_SECONDS, MAX_ADAPTERS
from localllm.server.ollama.progress import progress_response, work_lines
from localllm.server.ollama.schema import CopyBody, CreateBody, DeleteBody, PullBody
from localllm.server.service import Service, TheService
from localllm.settings import Settings

router = APIRouter(tags=["Ollama"])
json_router = APIRouter(route_class=JsonRoute, tags=["Ollama"])

# From requests, models come from these alone: a server must not be sent to addresses of its own network.
REGISTRIES = frozenset({OLLAMA_HOST, HUGGING_FACE_HOST})


@json_router.post("/api/pull")
async def pull_model(body: PullBody, request: Request, service: TheService) -> Response:
    """Bring a model to this machine."""
    name = ModelName.parse(check_name(body.model))
    if name.host not in REGISTRIES:
        raise ApiError(400, f"models are pulled from {' and '.join(sorted(REGISTRIES))} here; use `localllm pull`")
    return await progress_response(request, pull_lines(str(name), service.catalog.settings), body.stream)


@json_router.post("/api/create")
async def create_model(body: CreateBody, request: Request, service: TheService) -> Response:
    """Make a model from another one, or from an uploaded file."""
    name = ModelName.parse(check_name(body.model))
    for field in ("draft_files", "renderer", "parser"):
        if getattr(body, field):
            raise ApiError(400, f"{field} is not supported; leave it out")
    if body.quantize and body.quantize.upper() not in TYPES:
        raise ApiError(400, f"there is no type {body.quantize[:32]!r}; there are {', '.join(TYPES)}")
    recipe = _recipe(body)
    recipe.adapters = [str(path) for path in _blobs(service.catalog.settings, body.adapters or {}, MAX_ADAPTERS)]
    base = await to_thread.run_sync(_base, service, body)
    store = OwnStore(own_store(service.catalog.settings))

    def work(progress: PullProgress) -> None:
        progress(PullStatus("creating model"))
        made = base
        if body.quantize:
            facts = facts_of(base.path)
            size, digest = facts.summary.file_bytes, f"sha256:{facts.digest}"

            def tell(_what: str, share: float) -> None:
                progress(PullStatus(f"quantizing to {body.quantize}", digest, round(size * share), size))

            made = quantized_model(store, base, body.quantize, tell)
        create(store, name, recipe, made)
        progress(PullStatus("success"))

    return await progress_response(request, work_lines(work), body.stream)


@json_router.post("/api/copy")
async def copy_model(body: CopyBody, service: TheService) -> Response:
    """Give a model a second name."""
    target = ModelName.parse(check_name(body.destination))
    await to_thread.run_sync(_copy, service, body.source, target)
    return Response(status_code=200)


@json_router.delete("/api/delete")
async def delete_model(body: DeleteBody, service: TheService) -> Response:
    """Remove a model that localllm itself has stored."""
    name = ModelName.parse(check_name(body.model))
    store = OwnStore(own_store(service.catalog.settings))
    try:
        await to_thread.run_sync(store.remove, name)
    except ModelNotFoundError as error:
        raise errors.ModelNotFoundError(body.model) from error
    return Response(status_code=200)


@json_router.post("/api/push")
async def push_model() -> None:
    """Say that models are not published from here."""
    raise ApiError(501, "push is not supported")


@router.head("/api/blobs/{digest}")
async def has_blob(digest: str, service: TheService) -> Response:
    """Say whether a file is here."""
    path = _blob_path(service.catalog.settings, digest)
    return Response(status_code=200 if path.is_file() else 404)


@router.post("/api/blobs/{digest}")
async def add_blob(digest: str, request: Request, service: TheService) -> Response:
    """Take a file, which must have this digest."""
    path = _blob_path(service.catalog.settings, digest)
    if path.is_file():
        return Response(status_code=200)
    store = OwnStore(own_store(service.catalog.settings))
    store.prepare()
    partial = store.partial / f".{secrets.token_hex(8)}.tmp"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            found = await _receive(request, file.write, store.root)
            file.flush()
            await to_thread.run_sync(os.fsync, file.fileno())
        if found != digest:
            raise ApiError(400, f"digest mismatch, expected {digest!r}, got {found!r}")
        partial.replace(path)
        await to_thread.run_sync(sync_folder, path.parent)
    finally:
        partial.unlink(missing_ok=True)
    return Response(status_code=201)


async def _receive(request: Request, write: Callable[[bytes], Any], folder: Path) -> str:
    """Write a body and return its digest. Raises ApiError for one that stalls or fills the disk."""
    digest = hashlib.sha256()
    chunks = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                chunk = await anext(chunks, None)
        except TimeoutError as error:
            raise ApiError(408, f"nothing came for {BODY_SECONDS:g} seconds") from error
        if chunk is None:
            return f"sha256:{digest.hexdigest()}"
        if free_bytes(folder) < SPARE_BYTES + len(chunk):
            raise ApiError(507, f"the disk is full but for {SPARE_BYTES >> 20} MiB")
        digest.update(chunk)
        await to_thread.run_sync(write, chunk)


def _blob_path(settings: Settings, digest: str) -> Path:
    """Where a blob is, or would be. ApiError 400 for what is no digest, before any path is made of it."""
    try:
        return OwnStore(own_store(settings)).blobs / blob_name(check_digest(digest))
    except LibraryError as error:
        raise ApiError(400, "invalid digest format") from error


def _recipe(body: CreateBody) -> Modelfile:
    if body.template and is_jinja(body.template):
        raise ApiError(400, "template must be of Ollama's language here; `localllm create` takes Jinja")
    licenses = [body.license] if isinstance(body.license, str) else list(body.license or [])
    for name, value in (body.parameters or {}).items():
        kind = PARAMETERS.get(name)
        allowed = (int, float) if kind is float else kind if kind is not str else (str, list)
        if kind is None or not isinstance(value, allowed or ()) or isinstance(value, bool):
            raise ApiError(400, f"parameter {name[:64]!r} is unknown or of the wrong type")
    messages = [{"role": message.role, "content": message.content or ""} for message in body.messages or []]
    return Modelfile(
        source=body.from_ or "",
        parameters=dict(body.parameters or {}),
        template=body.template or None,
        system=body.system or None,
        licenses=licenses,
        messages=messages,
    )


def _base(service: Service, body: CreateBody) -> LibraryModel:
    if body.files:
        return _uploaded(service.catalog.settings, body.files)
    if body.from_:
        return _library_model(service, body.from_)
    raise ApiError(400, "neither 'from' or 'files' was specified")


def _uploaded(settings: Settings, files: dict[str, str]) -> LibraryModel:
    """The model of one uploaded file, or of the parts of one, whose order is that of their names."""
    paths = _blobs(settings, files, MAX_PARTS)
    digests = (digest for _, digest in sorted(files.items()))
    layers = [Layer("model", digest, path.stat().st_size) for digest, path in zip(digests, paths, strict=True)]
    return uploaded_model(OwnStore(own_store(settings)), layers)


def _blobs(settings: Settings, files: dict[str, str], most: int) -> list[Path]:
    """Where uploaded files lie, in the order of their names. Raises ApiError 400 for too many, and for missing ones."""
    if len(files) > most:
        raise ApiError(400, f"there are {len(files)} files or parts, more than {most}")
    paths = [_blob_path(settings, digest) for _, digest in sorted(files.items())]
    for path, (_, digest) in zip(paths, sorted(files.items()), strict=True):
        if not path.is_file():
            raise ApiError(400, f"blob {digest} is not here; upload it to /api/blobs/{digest} first")
    return paths


def _copy(service: Service, source: str, target: ModelName) -> None:
    base = _library_model(service, source)
    store = OwnStore(own_store(service.catalog.settings))
    create(store, target, Modelfile(source=source), base)


def _library_model(service: Service, name: str) -> LibraryModel:
    """The model of a name, served ones too."""
    settings = service.catalog.settings
    entry = service.catalog.find(name)
    assert isinstance(entry, CatalogEntry)  # no other catalog has settings
    if not is_path(name):
        try:
            return find(name, settings)
        except ModelNotFoundError:
            pass  # it was named when the server started
    return LibraryModel((entry.name,), Source.PATH, entry.path)


def pull_lines(name: str, settings: Settings) -> AsyncGenerator[bytes, None]:
    """Pull, line by line. What has arrived when nobody reads any more is kept for the next pull."""
    return work_lines(lambda progress: pull(name, settings, progress))
