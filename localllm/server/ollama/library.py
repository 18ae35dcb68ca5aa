"""/api/pull, push, create, copy, delete and blobs. Requests name models, never paths.

Long work runs on another thread and yields its progress as lines; it stops when the client leaves.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from gguf_io import open_model
from gguf_io.errors import LocalLLMError
from gguf_io.model_file import MAX_PARTS
from gguf_io.system import make_folder, open_own, replace, sync_file, sync_folder
from localllm.library.create import create, uploaded_model
from localllm.library.entry import LibraryModel
from localllm.library.errors import LibraryError, ModelNotFoundError
from localllm.library.go_templates import is_jinja
from localllm.library.manifest import Layer, blob_name, check_digest
from localllm.library.modelfile import PARAMETERS, Modelfile, check_range
from localllm.library.names import HUGGING_FACE_HOST, OLLAMA_HOST
from localllm.library.own_store import OwnStore, free_bytes
from localllm.library.places import own_store
from localllm.library.pull import SPARE_BYTES, PullProgress, PullStatus, pull
from localllm.library.push import push
from localllm.server import errors
from localllm.server.catalog import facts_of, parse_name
from localllm.server.errors import ApiError
from localllm.server.json_body import ProtocolRoute
from localllm.server.limits import BODY_SECONDS, MAX_ADAPTERS
from localllm.server.ollama.schema import CopyBody, CreateBody, DeleteBody, PullBody, PushBody
from localllm.server.ollama.wire import error_line
from localllm.server.service import Service, ServiceDep
from localllm.server.streams import streamed
from localllm.server.wire import NDJSON, ndjson
from localllm.wings.importing.adapters import CONFIG, WEIGHTS, convert_adapter
from localllm.wings.lab.quality.quantize import TYPES, quantized_model

router = APIRouter(route_class=ProtocolRoute, tags=["Ollama"])

# The only registries that requests may pull from: the server must not be made to call addresses of its own network.
REGISTRIES = frozenset({OLLAMA_HOST, HUGGING_FACE_HOST})

Work = Callable[[PullProgress], object]

_AT_ONCE = CapacityLimiter(4)


@router.post("/api/pull")
async def pull_model(body: PullBody, service: ServiceDep) -> Response:
    """Download a model."""
    name = parse_name(body.model)
    if name.host not in REGISTRIES:
        allowed = " and ".join(sorted(REGISTRIES))
        raise ApiError(400, f"requests may pull from {allowed} only; for others run `localllm pull`")
    # If the client leaves, the next pull resumes the download.
    return await _progress_response(partial(pull, str(name), service.models.settings), body.stream)


@router.post("/api/create")
async def create_model(body: CreateBody, service: ServiceDep) -> Response:
    """Create a model from another one, or from uploaded files."""
    name = parse_name(body.model)
    for field in ("draft_files", "renderer", "parser"):
        if getattr(body, field):
            raise ApiError(400, f"{field} is not supported; leave it out")
    if body.quantize and body.quantize.upper() not in TYPES:
        raise ApiError(400, f"unknown quantize type {body.quantize[:32]!r}; choose one of {', '.join(TYPES)}")
    recipe, store = _recipe(body), _store(service)
    uploaded, peft = _adapters(store, body.adapters or {})
    base = await to_thread.run_sync(_base, service, body)

    def work(progress: PullProgress) -> None:
        progress(PullStatus("creating model"))
        made = base
        if body.quantize:
            facts = facts_of(base.path)
            size, digest = facts.summary.file_bytes, f"sha256:{facts.digest}"

            def quantized(_what: str, share: float) -> None:
                progress(PullStatus(f"quantizing to {body.quantize}", digest, round(size * share), size))

            made = quantized_model(store, base, body.quantize, quantized)
        with tempfile.TemporaryDirectory(prefix="localllm-") as folder:
            converted = [_converted(peft, base.path, Path(folder))] if peft else []
            recipe.adapters = [str(path) for path in (*uploaded, *converted)]
            create(store, name, recipe, made)
        progress(PullStatus("success"))

    return await _progress_response(work, body.stream)


@router.post("/api/copy")
async def copy_model(body: CopyBody, service: ServiceDep) -> Response:
    """Copy a model under a new name."""
    target = parse_name(body.destination)

    def copy() -> None:
        base = _library_model(service, body.source)
        create(_store(service), target, Modelfile(source=body.source), base)

    await to_thread.run_sync(copy)
    return Response(status_code=200)


@router.delete("/api/delete")
async def delete_model(body: DeleteBody, service: ServiceDep) -> Response:
    """Delete a model from localllm's own store."""
    name, store = parse_name(body.model), _store(service)
    try:
        await to_thread.run_sync(store.remove, name)
    except ModelNotFoundError as error:
        raise errors.ModelNotFoundError(body.model) from error
    return Response(status_code=200)


@router.post("/api/push")
async def push_model(body: PushBody, service: ServiceDep) -> Response:
    """Upload a model of localllm's own store to the registry that its name begins with."""
    name, settings = parse_name(body.model), service.models.settings
    try:
        await to_thread.run_sync(_store(service).manifest, name)
    except ModelNotFoundError as error:
        raise errors.ModelNotFoundError(body.model) from error
    return await _progress_response(partial(push, name, settings, insecure=bool(body.insecure)), body.stream)


@router.head("/api/blobs/{digest}")
async def has_blob(digest: str, service: ServiceDep) -> Response:
    """Whether a blob exists: 200 or 404."""
    path = _blob_path(_store(service), digest)
    return Response(status_code=200 if os.path.isfile(path) else 404)


@router.post("/api/blobs/{digest}")
async def add_blob(digest: str, request: Request, service: ServiceDep) -> Response:
    """Upload a file with this digest."""
    store = _store(service)
    path = _blob_path(store, digest)
    if os.path.isfile(path):
        return Response(status_code=200)
    store.prepare()
    unfinished = store.partial / f".{secrets.token_hex(8)}.tmp"
    try:
        with open(open_own(unfinished, new=True), "wb") as file:
            found = await _receive(request, file.write, store.root)
            file.flush()
            await to_thread.run_sync(sync_file, file.fileno())
        if found != digest:
            raise ApiError(400, f"digest mismatch, expected {digest!r}, got {found!r}")
        replace(unfinished, path)
        await to_thread.run_sync(sync_folder, path.parent)
    finally:
        unfinished.unlink(missing_ok=True)
    return Response(status_code=201)


async def _receive(request: Request, write: Callable[[bytes], Any], folder: Path) -> str:
    """Write a body and return its digest. Raises ApiError if it stalls or would fill the disk."""
    digest = hashlib.sha256()
    chunks = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                chunk = await anext(chunks, None)
        except TimeoutError as error:
            raise ApiError(408, f"nothing arrived for {BODY_SECONDS:g} seconds") from error
        if chunk is None:
            return f"sha256:{digest.hexdigest()}"
        if free_bytes(folder) < SPARE_BYTES + len(chunk):
            raise ApiError(507, f"the disk is full: less than {SPARE_BYTES >> 20} MiB would be left")
        digest.update(chunk)
        await to_thread.run_sync(write, chunk)


def _store(service: Service) -> OwnStore:
    return OwnStore(own_store(service.models.settings))


def _blob_path(store: OwnStore, digest: str) -> Path:
    """A blob's path. Raises ApiError 400 for an invalid digest, before it becomes a path."""
    try:
        return store.blobs / blob_name(check_digest(digest))
    except LibraryError as error:
        raise ApiError(400, "invalid digest format") from error


def _recipe(body: CreateBody) -> Modelfile:
    if body.template and is_jinja(body.template):
        raise ApiError(400, "template must be in Ollama's template language; `localllm create` also accepts Jinja")
    licenses = [body.license] if isinstance(body.license, str) else list(body.license or [])
    for name, value in (body.parameters or {}).items():
        kind = PARAMETERS.get(name)
        allowed = (int, float) if kind is float else kind if kind is not str else (str, list)
        if kind is None or not isinstance(value, allowed or ()) or isinstance(value, bool) != (kind is bool):
            raise ApiError(400, f"parameter {name[:64]!r} is unknown or of the wrong type")
        check_range(name, value)
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
    """The model to start from: that of an uploaded file or of a split file's parts, or another model."""
    if body.files:
        store = _store(service)
        blobs = _blobs(store, body.files, MAX_PARTS)
        return uploaded_model(store, [Layer("model", digest, path.stat().st_size) for _, digest, path in blobs])
    if body.from_:
        return _library_model(service, body.from_)
    raise ApiError(400, "neither 'from' or 'files' was specified")


def _blobs(store: OwnStore, files: dict[str, str], most: int) -> list[tuple[PurePosixPath, str, Path]]:
    """The names, digests and paths of uploaded files, ordered by name.

    Raises ApiError 400 for too many, missing ones and names that lead elsewhere.
    """
    if len(files) > most:
        raise ApiError(400, f"{len(files)} files are too many; at most {most} are allowed")
    found = []
    for name, digest in sorted(files.items()):
        path, named = _blob_path(store, digest), PurePosixPath(name)
        if not named.name or named.is_absolute() or ".." in named.parts or "\\" in name:
            raise ApiError(400, f"the file name {name[:64]!r} must be a relative path without ..; send plain names")
        if not os.path.isfile(path):
            raise ApiError(400, f"missing blob {digest}; upload it to /api/blobs/{digest} first")
        found.append((named, digest, path))
    return found


def _adapters(store: OwnStore, files: dict[str, str]) -> tuple[list[Path], dict[str, Path]]:
    """Uploaded adapters in GGUF, and the two files of one in PEFT's format by name, if there is one.

    Other .json files, which Ollama's client sends along, are not needed. Raises ApiError 400.
    """
    found, plain, peft = _blobs(store, files, MAX_ADAPTERS), [], dict[str, Path]()
    for name, _, path in found:
        if name.name in (CONFIG, WEIGHTS):
            if name.name in peft:
                raise ApiError(400, f"there are two files {name.name}; send the files of one adapter")
            peft[name.name] = path
        elif name.suffix == ".safetensors":
            raise ApiError(400, f"{str(name)[:64]!r} is no adapter that can be converted; send PEFT's {WEIGHTS}")
        elif name.suffix != ".json":
            plain.append(path)
    if len(peft) == 1 or (found and not peft and not plain):
        lacking = " and ".join(sorted({CONFIG, WEIGHTS} - peft.keys()))
        raise ApiError(400, f"adapters lacks {lacking}; send both files of PEFT's adapter")
    return plain, peft


def _converted(peft: dict[str, Path], model: Path, made: Path) -> Path:
    """An adapter in PEFT's format as GGUF, in the folder `made`. Raises LibraryError."""
    folder, target = made / "adapter", made / "adapter.gguf"
    make_folder(folder)
    for name, path in peft.items():
        shutil.copyfile(path, folder / name)
    try:
        with open_model(model) as file:
            convert_adapter(folder, target, file)
    except LocalLLMError as error:
        message = error.message.replace(f"{folder}{os.sep}", "").replace(str(folder), "adapters")
        raise LibraryError(message, remedy=error.remedy) from error
    return target


def _library_model(service: Service, name: str) -> LibraryModel:
    return service.models.library_model(service.models.find(name))


class _StoppedError(Exception):
    """The client has left."""


async def work_lines(work: Work) -> AsyncGenerator[bytes, None]:
    """Run the work and yield its progress. Once the client has left, the work's next progress report ends it."""
    loop = asyncio.get_running_loop()
    arrived, stopped = asyncio.Event(), threading.Event()
    latest: dict[tuple[str, str | None], PullStatus] = {}

    def note(status: PullStatus) -> None:
        latest[status.status, status.digest] = status
        arrived.set()

    def progress(status: PullStatus) -> None:
        if stopped.is_set():
            raise _StoppedError
        loop.call_soon_threadsafe(note, status)

    def ended(done: "asyncio.Future[object]") -> None:
        arrived.set()
        if not done.cancelled():
            done.exception()  # retrieved, or asyncio logs it

    task = asyncio.ensure_future(to_thread.run_sync(work, progress, limiter=_AT_ONCE))
    task.add_done_callback(ended)
    try:
        while not task.done() or latest:
            await arrived.wait()
            arrived.clear()
            while latest:
                yield ndjson(_status_of(latest.pop(next(iter(latest)))))
        task.result()
    finally:
        stopped.set()


def _status_of(status: PullStatus) -> dict[str, Any]:
    if status.digest is None or not status.total:
        return {"status": status.status}
    return {
        "status": status.status,
        "digest": status.digest,
        "total": status.total,
        "completed": status.completed,
    }


async def _progress_response(work: Work, stream: bool | None) -> Response:
    """Respond with lines of progress, or with one success object at the end if stream is false."""
    lines = work_lines(work)
    if stream is not False:
        return await streamed(lines, error_line, NDJSON)
    async with contextlib.aclosing(lines):
        async for _ in lines:
            pass
    return JSONResponse({"status": "success"})
