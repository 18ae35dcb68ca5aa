"""Our own store: the only folder of models that localllm writes to.

manifests/<host>/<namespace>/<model>/<tag>    written last, so that a model is whole or not there
blobs/sha256-<64 hex digits>                  layers, and parts of split models beside their first
partial/                                      what is on its way; nothing here is ever taken for a model
.lock                                         held while manifests and blobs are made to agree
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from localllm.files import sync_folder, write_whole
from localllm.library.errors import LibraryError, ModelNotFoundError
from localllm.library.manifest import Layer, Manifest, blob_name, model_file_names, read_manifest
from localllm.library.names import BUILT_IN, ModelName

STALE_S = 3600  # younger temporary files may be somebody's


class OwnStore:
    """Manifests and blobs below one folder. Folders are made when something is written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests = root / "manifests"
        self.blobs = root / "blobs"
        self.partial = root / "partial"

    def prepare(self) -> None:
        """Make the folders. Raises LibraryError where that is not allowed, or they cannot be written."""
        try:
            for folder in (self.manifests, self.blobs):
                folder.mkdir(parents=True, exist_ok=True)
            self.partial.mkdir(mode=0o700, exist_ok=True)
            for folder in (self.root, self.manifests, self.blobs, self.partial):
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, "the folder cannot be written")
        except OSError as error:
            raise LibraryError(
                f"Models cannot be stored in {self.root}: {error.strerror}. "
                "Name another folder by the setting model_store (LOCALLLM_MODEL_STORE)."
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store still; for moments only. Raises LibraryError where it cannot be changed."""
        lock = FileLock(self.root / ".lock")
        try:
            lock.acquire()
        except OSError as error:
            raise LibraryError(f"{self.root} cannot be changed: {error.strerror}. Allow writing there.") from error
        try:
            yield
        finally:
            lock.release()

    def manifest_path(self, name: ModelName) -> Path:
        """Where the manifest of a name lies, or would lie; found without case.

        Raises LibraryError for the name of the built-in model, which is in no store.
        """
        if name.key == ModelName(BUILT_IN).key:
            raise LibraryError(
                f"{BUILT_IN} is the model that comes with localllm. It is neither removed nor copied, and no other is "
                "called so."
            )
        path = self.manifests
        for part in name.folders:
            there = [entry for entry in sorted(path.glob("*")) if entry.name.lower() == part.lower()]
            path = there[0] if there else path / part
        return path

    def manifest(self, name: ModelName) -> Manifest:
        """The manifest of one of our models. Raises ModelNotFoundError for a name that is not one."""
        return read_manifest(self._require(name), own=True)

    def _require(self, name: ModelName) -> Path:
        path = self.manifest_path(name)
        if not path.is_file():
            raise ModelNotFoundError(
                f"{name} is not in localllm's own store, {self.root}", "`localllm list` shows whose it is."
            )
        return path

    def add_blob(self, kind: str, data: bytes) -> Layer:
        """Store a small layer."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        path = self.blobs / blob_name(digest)
        if not path.is_file():
            write_whole(path, data)
        return Layer(kind, digest, len(data))

    def add_manifest(self, name: ModelName, manifest: Manifest) -> bool:
        """Write the manifest, and so make the model appear. False, and nothing done, where a blob is missing."""
        self.prepare()
        with self.locked():
            if not all((self.blobs / file).is_file() for file in blob_files(manifest)):
                return False
            path = self.manifest_path(name)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, manifest.dump())
            except OSError as error:
                raise LibraryError(f"{path}: cannot be written: {error.strerror}.") from error
        return True

    def copy(self, source: ModelName, target: ModelName) -> None:
        """Give one of our models a second name. No blob is copied. Raises LibraryError where one of its is gone."""
        if not self.add_manifest(target, self.manifest(source)):
            raise LibraryError(f"Files of {source} are gone. `localllm verify {source} --repair` brings them back.")

    def remove(self, name: ModelName) -> int:
        """Remove a model and the blobs that no other one uses; return the bytes that became free.

        A manifest that cannot be read is removed too. Raises ModelNotFoundError.
        """
        self._require(name)
        with self.locked():
            path = self._require(name)
            try:
                files = blob_files(read_manifest(path, own=True))
            except LibraryError:
                files = []
            path.unlink()
            sync_folder(path.parent)
            self._remove_empty(path.parent)
            used = self._used()
            return sum(_unlinked(self.blobs / file) for file in files if file not in used)

    def remove_unfinished(self) -> int:
        """Remove partial downloads that no process is at, and blobs that no model uses; return the bytes freed."""
        freed = 0
        if not self.root.is_dir():
            return freed
        with self.locked():
            aged = [path for path in self.partial.glob(".*.tmp") if path.stat().st_mtime < time.time() - STALE_S]
            for path in [*self.partial.glob("*.part"), *self.partial.glob("*.json"), *aged]:
                lock = FileLock(path.with_suffix(".lock"))
                with _if_free(lock) as free:
                    freed += _unlinked(path) if free else 0
            used = self._used()
            freed += sum(_unlinked(path) for path in self.blobs.glob("*") if path.name not in used)
        return freed

    def _used(self) -> set[str]:
        """File names of all blobs that a manifest names. A damaged manifest names none."""
        used: set[str] = set()
        for path in self.manifests.glob("*/*/*/*"):
            try:
                used.update(blob_files(read_manifest(path, own=True)))
            except LibraryError:
                continue
        return used

    def _remove_empty(self, folder: Path) -> None:
        while folder != self.manifests and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent


def blob_files(manifest: Manifest) -> list[str]:
    """File names of all blobs of a manifest."""
    models = manifest.of_kind("model")
    others = [blob_name(layer.digest) for layer in manifest.layers if layer.kind != "model"]
    return [*(model_file_names(models) if models else []), *others]


def free_bytes(folder: Path) -> int:
    """Free disk space where a folder is, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextmanager
def _if_free(lock: FileLock) -> Iterator[bool]:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def _unlinked(path: Path) -> int:
    if not path.is_file():
        return 0
    size = path.stat().st_blocks * 512  # what a file with holes takes
    path.unlink()
    return size
