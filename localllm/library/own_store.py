"""localllm's own store: the only folder of models that it writes to.

manifests/<host>/<namespace>/<model>/<tag>    written last, so that a model is complete or absent
blobs/sha256-<64 hex digits>                  layers, and parts of split models beside the first part
partial/                                      downloads and temporary files; nothing here counts as a model
.lock                                         held while manifests and blobs change together; marks the store as ours
"""

import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from filelock import FileLock

from gguf_io.system import disk_bytes, make_folder, sync_folder
from localllm.files import TEMPORARY, listed, stale, write_whole
from localllm.library.errors import LibraryError, ModelNotFoundError
from localllm.library.manifest import (
    Layer,
    Manifest,
    blob_files,
    blob_name,
    manifest_files,
    model_folders,
    read_manifest,
)
from localllm.library.names import BUILT_IN, ModelName

log = logging.getLogger(__name__)

# Patterns of the file names that localllm creates and may remove. Nothing else is touched, in any folder.
_BLOB = re.compile(r"sha256-[0-9a-f]{64}(-\d{5}-of-\d{5}\.gguf)?")
_DOWNLOAD = re.compile(r"(sha256|url)-[0-9a-f]{64}\.(part|json|lock)")
_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY)}.+|\.[0-9a-f]{{16}}\.tmp")

ELSEWHERE = "Name another folder by the setting model_store (LOCALLLM_MODEL_STORE)."


class OwnStore:
    """Manifests and blobs below one folder. Folders are created when something is written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests = root / "manifests"
        self.blobs = root / "blobs"
        self.partial = root / "partial"
        self._lock = root / ".lock"

    def prepare(self) -> None:
        """Create the folders. Raises LibraryError if they cannot be written, and for another program's store."""
        try:
            self._check_ours()
            make_folder(self.root)
            if not os.path.exists(self._lock):
                self._lock.touch(mode=0o600)
            for folder in (self.manifests, self.blobs):
                make_folder(folder)
            make_folder(self.partial)
            for folder in (self.root, self.manifests, self.blobs, self.partial):
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, "the folder cannot be written")
        except OSError as error:
            raise LibraryError(f"Models cannot be stored in {self.root}: {error.strerror}. {ELSEWHERE}") from error

    def _check_ours(self) -> None:
        """Raise LibraryError for a store that another program made: Ollama's has the same layout."""
        used = any(os.path.exists(folder) for folder in (self.manifests, self.blobs, self.partial))
        if used and not os.path.exists(self._lock):
            raise LibraryError(
                f"{self.root} has no {self._lock.name} file, so localllm did not make this store. {ELSEWHERE}"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from changing the store; hold it only briefly. Raises LibraryError."""
        self._check_ours()
        lock = FileLock(self._lock, preserve_lock_file=True)  # it marks the store; Windows would remove it
        try:
            lock.acquire()
        except OSError as error:
            raise LibraryError(f"{self.root} cannot be changed: {error.strerror}. Allow writing there.") from error
        try:
            yield
        finally:
            lock.release()

    def manifest_path(self, name: ModelName) -> Path:
        """Where the manifest of a name is, or would be; found case-insensitively.

        Raises LibraryError for the name of the built-in model, which no store may contain.
        """
        if name.key == ModelName(BUILT_IN).key:
            raise LibraryError(
                f"{BUILT_IN} is the model that comes with localllm: it cannot be removed, copied or replaced."
            )
        path = self.manifests
        for part in name.folders:
            there = [entry for entry in listed(path, self._unreadable) if entry.name.lower() == part.lower()]
            path = there[0] if there else path / part
        return path

    def manifest(self, name: ModelName) -> Manifest:
        """The manifest of a model in this store. Raises ModelNotFoundError if there is none of that name."""
        return read_manifest(self._require(name), own=True)

    def _require(self, name: ModelName) -> Path:
        path = self.manifest_path(name)
        if not os.path.isfile(path):
            raise ModelNotFoundError(
                f"{name} is not in localllm's own store, {self.root}", "`localllm list` shows the source of each model."
            )
        return path

    def add_blob(self, kind: str, data: bytes) -> Layer:
        """Store a small layer."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        path = self.blobs / blob_name(digest)
        if not os.path.isfile(path):
            write_whole(path, data)
        return Layer(kind, digest, len(data))

    def add_manifest(self, name: ModelName, manifest: Manifest) -> bool:
        """Write the manifest, which makes the model visible. Returns False and writes nothing if a blob is missing."""
        self.prepare()
        with self.locked():
            if not all(os.path.isfile(self.blobs / file) for file in blob_files(manifest.layers)):
                return False
            path = self.manifest_path(name)
            try:
                make_folder(path.parent)
                write_whole(path, manifest.dump())
            except OSError as error:
                raise LibraryError(f"{path}: cannot be written: {error.strerror}.") from error
        return True

    def copy(self, source: ModelName, target: ModelName) -> None:
        """Copy a model under a new name without copying blobs. Raises LibraryError if one of its blobs is missing."""
        if not self.add_manifest(target, self.manifest(source)):
            raise LibraryError(
                f"Files of {source} are gone.", remedy=f"`localllm verify {source} --repair` pulls them again."
            )

    def temporary(self, suffix: str = ".tmp") -> Path:
        """A new name for a temporary file; remove_unfinished recognises it if it is left behind."""
        return self.partial / f"{TEMPORARY}{secrets.token_hex(8)}{suffix}"

    def remove(self, name: ModelName) -> int:
        """Remove a model and the blobs that no other model uses; return the bytes freed.

        Packed weights of the removed files are removed too (localllm/packed.py) and not counted.
        A manifest that cannot be read is removed as well. Raises ModelNotFoundError.
        """
        self._require(name)
        with self.locked():
            path = self._require(name)
            try:
                files = blob_files(read_manifest(path, own=True).layers)
            except LibraryError:
                files = []  # unknown: its blobs stay for remove_unfinished
            path.unlink()
            sync_folder(path.parent)
            self._remove_empty(path.parent)
            return self._remove_unused(files)

    def discard(self, files: Iterable[str]) -> None:
        """Remove the given blobs that no model uses."""
        with self.locked():
            self._remove_unused(files)

    def remove_unfinished(self) -> int:
        """Remove partial downloads that no process holds, and blobs that no model uses; return the bytes freed."""
        self._check_ours()
        if not os.path.exists(self._lock):
            return 0
        with self.locked():
            freed = 0
            for path in listed(self.partial, self._unreadable):
                if not _DOWNLOAD.fullmatch(path.name):
                    continue
                lock = FileLock(path.with_suffix(".lock"))
                with suppress(OSError):  # another process has it, or it is not our file
                    lock.acquire(blocking=False)
                if lock.is_locked:
                    freed += _unlinked(path)
                    lock.release()
                    Path(lock.lock_file).unlink(missing_ok=True)
            folders = (self.partial, self.blobs, *model_folders(self.manifests, self._unreadable))
            files = [path for folder in folders for path in listed(folder, self._unreadable)]
            freed += sum(_unlinked(path) for path in files if _TEMPORARY.fullmatch(path.name) and stale(path))
            return freed + self._remove_unused(path.name for path in listed(self.blobs, self._unreadable))

    def _remove_unused(self, files: Iterable[str]) -> int:
        """Unlink the given blobs that no manifest names; none if a manifest is unreadable, since it may name any."""
        used: set[str] = set()
        for path in manifest_files(self.manifests, self._unreadable):
            try:
                used.update(blob_files(read_manifest(path, own=True).layers))
            except LibraryError as error:
                log.warning(
                    "Files of models are kept, because a manifest that cannot be read may need them. %s "
                    "`localllm rm --unfinished` then frees them.",
                    error,
                )
                return 0
        unused = [file for file in files if _BLOB.fullmatch(file) and file not in used]
        freed = sum(_unlinked(self.blobs / file) for file in unused)
        if unused:
            from localllm.packed import remove_orphans  # slow to import

            remove_orphans()
        return freed

    def _unreadable(self, error: OSError) -> NoReturn:
        raise LibraryError(f"{error.filename}: cannot be read: {error.strerror}. {ELSEWHERE}") from error

    def _remove_empty(self, folder: Path) -> None:
        while folder != self.manifests and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent


def free_bytes(folder: Path) -> int:
    """Free disk space where a folder is, or will be."""
    while not os.path.exists(folder):
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _unlinked(path: Path) -> int:
    if not os.path.isfile(path):
        return 0
    size = disk_bytes(path.stat())
    try:
        path.unlink()
    except PermissionError as error:  # on Windows also while a program has loaded it
        log.warning("%s stays: %s. `localllm rm --unfinished` removes it later.", path, error.strerror)
        return 0
    return size
