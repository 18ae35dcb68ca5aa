"""Pushing a model of our own store to a registry that speaks Ollama's protocol.

It is Docker's: HEAD asks for a blob, POST /v2/<repository>/blobs/uploads/ begins an upload, PATCH sends its bytes in
chunks, PUT with the digest ends it, and PUT /v2/<repository>/manifests/<tag> comes last. Every response of an upload
has the address for its next request. Blobs that the registry has are not sent again, so an interrupted push resumes; a
broken connection resumes within a chunk, after GET has told how much arrived. Registries that require a login are
refused, as for pulls.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from gguf_io import open_model
from gguf_io.system import open_regular
from localllm.errors import reason
from localllm.library.errors import LibraryError, PushError
from localllm.library.listing import file_type
from localllm.library.manifest import MEDIA_TYPE, Layer, Manifest, blob_files
from localllm.library.names import HUGGING_FACE_HOST, OLLAMA_HOST, ModelName
from localllm.library.own_store import OwnStore
from localllm.library.places import Places, own_store
from localllm.library.pull import TELL_S, PullProgress, PullStatus
from localllm.library.registry import base_address
from localllm.library.summary import summarize
from localllm.library.web import MAX_FAILURES, PASSING, PassingError, backoff, decimal, new_client
from localllm.text import human_count, shortened

CHUNK_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
_LONGEST_ANSWER = 1 << 16


@dataclass(frozen=True, slots=True)
class _Blob:
    """What to push for a layer: a file, or a few bytes."""

    layer: Layer
    path: Path | None = None
    data: bytes = b""


def push(name: ModelName, where: Places, progress: PullProgress, insecure: bool = False) -> None:
    """Push the model of this name in our own store to the registry that the name begins with.

    insecure: without TLS, also to another machine. progress is called on this thread; an exception from it stops the
    push. Raises LibraryError: ModelNotFoundError if the store has no such model, PushError if the registry refuses it.
    """
    store = OwnStore(own_store(where))
    progress(PullStatus("retrieving manifest"))
    manifest = store.manifest(name)
    if name.host in (OLLAMA_HOST, HUGGING_FACE_HOST):
        raise PushError(
            f"{name.host} takes models only after a login, which localllm does not have. Name a registry of your own: "
            f"`localllm cp {name} HOST/USER/{name.model}`, then push that name."
        )
    with new_client() as client:
        upload = _Push(client, base_address(name, insecure), progress)
        blobs = _blobs(store, name, manifest, progress)
        config = _config(blobs)
        for blob in (*blobs, config):
            upload.blob(blob)
        progress(PullStatus("pushing manifest"))
        dumped = Manifest(tuple(blob.layer for blob in blobs)).dump()
        about = {"mediaType": _CONFIG_TYPE, "digest": config.layer.digest, "size": config.layer.size}
        upload.manifest(name.tag, json.dumps({**json.loads(dumped), "config": about}).encode())
    progress(PullStatus("success"))


def _blobs(store: OwnStore, name: ModelName, manifest: Manifest, progress: PullProgress) -> list[_Blob]:
    """The layers with their files. Files outside the store that the manifest links to become layers, too."""
    linked = [("projector", manifest.projector_link)] if manifest.projector_link else []
    if manifest.link is not None:
        with open_model(manifest.link) as file:
            linked = [*(("model", path) for path in file.paths), *linked]
    found = []
    for kind, path in linked:
        progress(PullStatus(f"reading {path.name}"))
        found.append(_Blob(_layer_of(kind, path), path))
    for layer, file_name in zip(manifest.layers, blob_files(manifest.layers), strict=True):
        path = store.blobs / file_name
        if not os.path.isfile(path) or path.stat().st_size != layer.size:
            raise LibraryError(
                f"{name}: {path} is gone or damaged.", remedy=f"`localllm verify {name} --repair` pulls it again."
            )
        found.append(_Blob(layer, path))
    return found


def _layer_of(kind: str, path: Path) -> Layer:
    try:
        with open(open_regular(path), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Layer(kind, f"sha256:{digest}", file.tell())
    except OSError as error:
        raise LibraryError(f"{path}: cannot be read: {error.strerror}. Create the model again.") from error


def _config(blobs: list[_Blob]) -> _Blob:
    """What Ollama tells of a model without opening its file."""
    models = [blob.path for blob in blobs if blob.layer.kind == "model" and blob.path is not None]
    with open_model(models[0]) as file:
        summary = summarize(file)
        about = {
            "model_format": "gguf",
            "model_family": summary.architecture,
            "model_families": [summary.architecture],
            "model_type": human_count(summary.parameters).replace(" ", ""),
            "file_type": file_type(file) or summary.quantization,
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [blob.layer.digest for blob in blobs]},
        }
    data = json.dumps(about).encode()
    return _Blob(Layer("config", f"sha256:{hashlib.sha256(data).hexdigest()}", len(data)), data=data)


@dataclass(slots=True)
class _Push:
    client: httpx2.Client
    base: str  # the repository's address
    progress: PullProgress
    told_at: float = field(default=0.0)

    def blob(self, blob: _Blob) -> None:
        """Upload a blob, unless the registry has it."""
        layer = blob.layer
        answer = self._persistently("HEAD", f"{self.base}/blobs/{layer.digest}", "looking for a blob", (200, 404))
        if answer.status_code == 404:
            self._upload(blob)
        self._tell(layer, layer.size, True)

    def manifest(self, tag: str, data: bytes) -> None:
        """Send the manifest, which makes the model visible."""
        url = f"{self.base}/manifests/{tag}"
        self._persistently("PUT", url, "the manifest", (200, 201), data, {"Content-Type": MEDIA_TYPE})

    def _upload(self, blob: _Blob) -> None:
        """Send a blob's bytes. Raises PushError when attempts in a row bring nothing more."""
        failures, at, url = 0, 0, ""
        while True:
            try:
                if not url:
                    at, url = 0, self._begin()
                while at < blob.layer.size:
                    stop = min(at + CHUNK_BYTES, blob.layer.size)
                    url, at = self._chunk(blob, url, at, stop), stop
                    failures = 0
                self._end(blob, url)
                return
            except PassingError as error:
                failures += 1
                if failures == MAX_FAILURES:
                    raise PushError(f"{error}. Push again: what has arrived whole is not sent again.") from error
                time.sleep(backoff(failures, error))
                arrived = self._arrived(url) if url else None
                if arrived is None:
                    url = ""
                elif arrived > at:
                    at, failures = arrived, 0

    def _begin(self) -> str:
        return self._next(self._ask("POST", f"{self.base}/blobs/uploads/", "an upload", (201, 202)), None)

    def _chunk(self, blob: _Blob, url: str, at: int, stop: int) -> str:
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(stop - at),
            "Content-Range": f"{at}-{stop - 1}",
        }
        answer = self._ask("PATCH", url, "a chunk", (200, 201, 202, 204), self._pieces(blob, at, stop), headers)
        return self._next(answer, url)

    def _end(self, blob: _Blob, url: str) -> None:
        whole = httpx2.URL(url).copy_merge_params({"digest": blob.layer.digest})
        self._ask("PUT", str(whole), "the end of an upload", (200, 201, 202, 204))

    def _arrived(self, url: str) -> int | None:
        """How many bytes of an upload the registry has; None if it does not tell, and the upload must start over."""
        try:
            answer = self._ask("GET", url, "the state of an upload", (200, 204))
        except (PushError, PassingError):
            return None
        last = decimal(answer.headers.get("range", "").rpartition("-")[2])
        return None if last is None else last + 1

    def _pieces(self, blob: _Blob, at: int, stop: int) -> Iterator[bytes]:
        if blob.path is None:
            yield blob.data[at:stop]
            return
        try:
            with open(open_regular(blob.path), "rb") as file:
                file.seek(at)
                while at < stop:
                    piece = file.read(min(_PIECE_BYTES, stop - at))
                    if not piece:
                        raise PushError(f"{blob.path}: was shortened while it was pushed. Push again.")
                    at += len(piece)
                    self._tell(blob.layer, at)
                    yield piece
        except OSError as error:
            raise PushError(f"{blob.path}: cannot be read: {error.strerror}.") from error

    def _tell(self, layer: Layer, done: int, now: bool = False) -> None:
        if now or time.monotonic() - self.told_at >= TELL_S:
            self.told_at = time.monotonic()
            self.progress(PullStatus(f"pushing {layer.digest[7:19]}", layer.digest, done, layer.size))

    def _next(self, answer: httpx2.Response, url: str | None) -> str:
        """The address for the next request of an upload. It stays with the host that the user named."""
        given = answer.headers.get("location") or url
        if given is None:
            raise PushError(f"{answer.url.host} does not say where to send a blob. Is it a registry?")
        try:
            target = answer.url.join(given)
        except httpx2.InvalidURL as error:
            raise PushError(f"{answer.url.host} sends the upload to an invalid address: {error}.") from error
        if (target.scheme, target.host) != (answer.url.scheme, answer.url.host):
            raise PushError(f"{answer.url.host} sends the upload elsewhere, to {target.host}, which is not supported.")
        return str(target)

    def _persistently(
        self, method: str, url: str, what: str, good: tuple[int, ...], data: Any = None, headers: Any = None
    ) -> httpx2.Response:
        for failures in range(1, MAX_FAILURES + 1):
            try:
                return self._ask(method, url, what, good, data, headers)
            except PassingError as error:
                if failures == (2 if error.unreachable else MAX_FAILURES):
                    raise PushError(f"{error}. Tried {failures} times; push again later.") from error
                time.sleep(backoff(failures, error))
        raise AssertionError  # the loop returns or raises

    def _ask(
        self,
        method: str,
        url: str,
        what: str,
        good: tuple[int, ...],
        data: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        """One request. Raises PassingError for what may succeed later, and PushError for a refusal."""
        try:
            answer = self.client.request(method, url, content=data, headers=dict(headers or {}))
        except httpx2.TransportError as error:
            unreachable = isinstance(error, httpx2.ConnectError)
            raise PassingError(f"{httpx2.URL(url).host}: {reason(error)}", unreachable=unreachable) from error
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise PushError(f"{shortened(url)}: is not an address that can be opened: {error}.") from error
        if answer.status_code in good:
            return answer
        host, said = answer.url.host, _said(answer)
        if answer.status_code in PASSING:
            raise PassingError(f"{host} answers {answer.status_code} to {what}{said}")
        if answer.status_code in (401, 403):
            raise PushError(
                f"{host} requires a login, which localllm does not have{said}. Choose another registry: "
                "`localllm cp NAME HOST/USER/NAME`, then push that name."
            )
        if "digest" in said.lower():
            raise PushError(f"{host} received another content than the digest says{said}. `localllm verify` the model.")
        raise PushError(f"{host} refuses {what} with {answer.status_code} {answer.reason_phrase}{said}.")


def _said(answer: httpx2.Response) -> str:
    """The error messages of a registry's response, after a colon; "" for none."""
    try:
        errors = json.loads(answer.content[:_LONGEST_ANSWER])["errors"]
        said = "; ".join(str(error.get("message") or error.get("code")) for error in errors)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    return f": {shortened(said.rstrip('.'), 200)}" if said else ""
