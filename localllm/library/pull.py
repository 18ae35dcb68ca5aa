"""Pulling a model: the same three steps for every kind of source.

Find out which files make it up (`hub`, `registry`, or one address), download each into the store under its digest, and
write the manifest. An interrupted pull resumes; one download serves all processes that want the file.
"""

import hashlib
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import httpx2
from filelock import FileLock, Timeout

from gguf_io import open_model
from gguf_io.system import remove_held_lock
from localllm.errors import ModelFileError
from localllm.library import hub, registry
from localllm.library.download import Download, disk_error
from localllm.library.entry import LibraryModel, Source
from localllm.library.errors import PullError
from localllm.library.lookup import built_in_model, stored_name, wanted_names
from localllm.library.manifest import MAX_LAYER_BYTES, Layer, Manifest, blob_files, blob_name
from localllm.library.names import BUILT_IN, HUGGING_FACE_HOST, ModelName
from localllm.library.own_store import OwnStore, free_bytes
from localllm.library.partial import PartialFile, bytes_noted, remove_leftovers
from localllm.library.places import Places, own_store
from localllm.library.plan import PullPlan, RemoteFile
from localllm.library.stores import stored_models
from localllm.library.web import Remote, check_status, get, length_of, new_client, persistently

SPARE_BYTES = 256 << 20  # left free on the disk
TELL_S = 0.1  # between two calls of progress
_LOCK_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class PullStatus:
    """Progress of a pull. completed and total: bytes of the whole model; digest: of the current file."""

    status: str
    digest: str | None = None
    completed: int = 0
    total: int = 0


PullProgress = Callable[[PullStatus], None]


def pull(
    name: str,
    where: Places,
    progress: PullProgress = lambda _status: None,
    damaged: Collection[Path] = (),
) -> LibraryModel:
    """Download a model into the store: qwen3:0.6b, host/namespace/model:tag, hf.co/user/repo:Q4_K_M, or a URL.

    The built-in model needs no pull. damaged: blobs to download again; each stays until the new one replaces it.

    progress is called on this thread, at most ten times a second; an exception from it stops the pull. Raises PullError
    or LibraryError; what arrived until then is kept for the next pull.
    """
    if BUILT_IN in wanted_names(name):
        return built_in_model()
    store = OwnStore(own_store(where))
    store.prepare()
    with new_client() as client:
        progress(PullStatus("pulling manifest"))
        plan = files_of(client, name)
        _Pull(client, store, plan, progress, set(damaged)).run()
    for model in stored_models(store.root, Source.OWN):
        if plan.name.key in model.names:
            return model
    raise PullError(f"{plan.name} was removed as soon as it was pulled. Pull it again.")


def files_of(client: httpx2.Client, name: str) -> PullPlan:
    """The files that make up a model, according to its source. Raises PullError and LibraryError."""
    parsed = stored_name(name)
    if parsed.host == HUGGING_FACE_HOST:
        return hub.plan(client, parsed)
    if "://" in name:
        return _single_file(client, name, parsed)
    return registry.plan(client, parsed)


def _single_file(client: httpx2.Client, url: str, name: ModelName) -> PullPlan:
    """One GGUF file at any address: its digest is not known beforehand, so only its length and content are checked.

    Raises PullError if the host does not give its length.
    """

    def ask() -> tuple[int, str]:
        with get(client, Remote(url), {"Range": "bytes=0-0"}) as response:
            check_status(response, url)
            total = length_of(response)
            if total is None or not 0 < total <= MAX_LAYER_BYTES:
                raise PullError(f"{response.url.host} does not say how long {url} is, so it cannot be checked.")
            # A weak ETag may stay the same while bytes change (RFC 9110, 8.8.1).
            etag = response.headers.get("etag", "")
            return total, "" if etag.startswith("W/") else etag

    size, etag = persistently(ask, time.sleep)
    key = f"url-{hashlib.sha256(url.encode()).hexdigest()}"
    return PullPlan(name, (RemoteFile("model", Remote(url, etag=etag), size, url, key, None),))


@dataclass(slots=True)
class _Pull:
    client: httpx2.Client
    store: OwnStore
    plan: PullPlan
    progress: PullProgress
    damaged: set[Path]
    before: int = 0  # bytes of the files that are complete
    told_at: float = 0.0

    @property
    def total(self) -> int:
        return sum(file.size for file in self.plan.files)

    def run(self) -> None:
        self._check_disk()
        for _ in range(2):  # retry once if another process removed a blob before the manifest was written
            layers = self._fetch_all()
            if self.store.add_manifest(self.plan.name, Manifest(layers, title=self.plan.title)):
                self.progress(PullStatus("success", completed=self.total, total=self.total))
                return
        raise PullError(f"{self.plan.name}: its files were removed while they were pulled. Pull it again.")

    def _check_disk(self) -> None:
        files = [file for file, name in self._targets() if name and not self._is_here(name)]
        needed = sum(file.size - bytes_noted(self.store.partial, file.key) for file in files)
        free = free_bytes(self.store.root)
        if needed + SPARE_BYTES > free:
            raise PullError(
                f"{self.plan.name} does not fit on the disk: {needed / 2**20:,.0f} MiB are still to download, "
                f"{SPARE_BYTES >> 20} MiB must stay free, and {self.store.root} has "
                f"{free / 2**20:,.0f} MiB. Free some space, or choose another folder with model_store."
            )

    def _is_here(self, name: str) -> bool:
        path = self.store.blobs / name
        return path not in self.damaged and os.path.isfile(path)

    def _targets(self) -> list[tuple[RemoteFile, str]]:
        """Each file with its name in the store; "" if the digest is only known once the file is downloaded."""
        files = self.plan.files
        if any(file.digest is None for file in files):
            return [(file, "") for file in files]
        return list(zip(files, blob_files([file.layer(str(file.digest)) for file in files]), strict=True))

    def _fetch_all(self) -> tuple[Layer, ...]:
        self.before = 0
        layers = []
        for file, name in self._targets():
            layers.append(file.layer(self._fetch(file, name)))
            self.before += file.size
        self._check_model(layers)
        return tuple(layers)

    def _fetch(self, file: RemoteFile, name: str) -> str:
        """Download one file into the store and return its digest."""
        lock = FileLock(self.store.partial / f"{file.key}.lock")
        self._acquire(lock, file)
        try:
            if file.digest is not None and self._is_here(name):
                remove_leftovers(self.store.partial, file.key)
                return file.digest
            return self._download(file, name)
        finally:
            lock.release()

    def _acquire(self, lock: FileLock, file: RemoteFile) -> None:
        """Wait while another process downloads the same file, and report its progress."""
        while True:
            try:
                lock.acquire(timeout=_LOCK_POLL_S)
                return
            except Timeout:
                self._tell("another localllm is pulling", file, bytes_noted(self.store.partial, file.key))
            except OSError as error:  # such as a symbolic link, which is not followed
                raise PullError(f"{lock.lock_file}: cannot be locked: {error.strerror}. Remove it.") from error

    def _download(self, file: RemoteFile, name: str) -> str:
        validator = file.digest or file.remote.etag
        try:
            partial = PartialFile(self.store.partial, file.key, file.size, validator)
        except OSError as error:
            raise disk_error(error) from error
        try:
            download = Download(self.client, file.remote, partial, file.what)
            digest = download.run(lambda done: self._tell("pulling", file, done))
            if file.digest is not None and digest != file.digest:
                remove_leftovers(self.store.partial, file.key)
                raise PullError(
                    f"{file.what} does not match its listing: its digest is {digest} instead of {file.digest}. "
                    "It was removed. Pull again, or from another host."
                )
            place = self.store.blobs / (name or blob_name(digest))
            partial.keep_as(place)
            self.damaged.discard(place)
        except OSError as error:
            raise disk_error(error) from error
        finally:
            partial.close()
        remove_held_lock(self.store.partial / f"{file.key}.lock")
        return digest

    def _tell(self, status: str, file: RemoteFile, done: int) -> None:
        now = time.monotonic()
        if now - self.told_at >= TELL_S:
            self.told_at = now
            self.progress(PullStatus(status, file.digest, self.before + done, self.total))

    def _check_model(self, layers: list[Layer]) -> None:
        """Raise PullError if the files are not a model, which a matching digest does not rule out."""
        names = blob_files([layer for layer in layers if layer.kind == "model"])
        try:
            with open_model(self.store.blobs / names[0]):
                pass
        except ModelFileError as error:
            self.store.discard(names)
            raise PullError(f"{self.plan.name} cannot be used and was not kept: {error}") from error
