"""A disk cache of packed weights, so that a model's next load maps them instead of packing again.

A file's name is derived from everything that its content depends on: the state of the model's files (path, size, times,
inode), the code that packed it and the processor that it is for. So different versions of localllm have separate files;
the least recently used are evicted first. models/packed_file.py defines the content.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import platformdirs
from numpy.typing import NDArray

from cpu_kernels.cores import usable_cores
from cpu_kernels.kernel_cache import cache_directory
from cpu_kernels.limits import available_memory
from gguf_io import ModelFile
from gguf_io.model_file import FileState
from gguf_io.system import (
    disk_bytes,
    is_private,
    lower_thread_priority,
    make_folder,
    open_own,
    open_regular,
    replace,
    sync_folder,
)
from localllm.errors import OutOfMemoryError
from localllm.files import TEMPORARY, unsettled_s
from models.packed_file import DamagedError, PackedWeights, PackedWriter, map_packed, parts_of, read_about

if TYPE_CHECKING:
    from models.native_runner import NativeRunner

log = logging.getLogger(__name__)

PACKED_NAME = re.compile(rf"[0-9a-f]{{32}}\.packed|{re.escape(TEMPORARY)}[0-9a-z_]{{8}}\.packed")
"""File names recognised as ours: complete files, and files that were being written."""
DEFAULT_BYTES = 16 * 2**30
DEFAULT_SHARE = 0.25  # of the free disk
LEAST_BYTES = 64 * 2**20  # smaller models pack about as fast as they are read
FREE_TIMES = 2  # a file is written only if this many times its size is free
LEAST_MEMORY = 2**30
_WAIT_S, _LOWEST_PRIORITY = 2.0, 19  # the load's own work comes first
_POLL_S = 0.5
_SOON_BYTES, _PATIENCE_S = 2**30, 5.0  # how much an ending process still writes, and how long it waits for that
_ROOT = Path(__file__).parent.parent
_DECIDING = ("gguf_io/*.py", "gguf_io/layouts/*.py", "models/weights.py", "models/packed_file.py")


def packed_folder() -> Path:
    """The folder shared by all processes of this user, e.g. ~/.cache/localllm/packed."""
    return Path(platformdirs.user_cache_dir("localllm", appauthor=False)) / "packed"


def open_with_packed(
    file: ModelFile,
    ready: PackedWeights | None,
    limit_mib: int | None,
    opened: "Callable[[PackedWeights | None], NativeRunner]",
) -> "NativeRunner":
    """A runner that `opened` makes from find_packed's result or, given None, by packing the file's own weights.

    In the latter case the packed weights are written to disk in the background, until the runner closes. limit_mib: the
    setting; 0 turns both off. Raises what `opened` raises.
    """
    if ready is not None:
        runner = opened(ready)
        try:
            ready.check()
        except (DamagedError, OSError) as error:
            runner.close()
            _remove_damaged(_path(file), error)
        except BaseException:
            runner.close()
            raise
        else:
            return runner
    runner = opened(None)
    keeper = keep_packed(file, runner.packed, limit_mib)
    if keeper is not None:
        runner.closing.append(keeper.stop)
    return runner


def open_from_disk(
    file: ModelFile,
    ready: PackedWeights | None,
    limit_mib: int | None,
    size: int,
    opened: "Callable[[PackedWeights | None], NativeRunner]",
    progress: Callable[[str, float], None] | None,
) -> "NativeRunner":
    """A runner that `opened` makes with mapped weights, which are first packed to disk if they are missing there.

    ready: find_packed's result. size: bytes of the packed weights. Packing takes a few MiB of memory, and waits while
    another process writes packed weights. Raises OutOfMemoryError if the disk has no space for them, OSError, and what
    `opened` raises.
    """
    for _ in range(2):  # retry once if the file on disk is damaged
        if ready is None:
            _pack_to_disk(file, limit_mib, size, progress)
        if (ready := ready or find_packed(file, limit_mib)) is None:
            break
        try:
            ready.check()
        except (DamagedError, OSError) as error:
            _remove_damaged(_path(file), error)
            ready = None
        else:
            return opened(ready)
    raise OutOfMemoryError(f"{file.path.name} cannot run from the disk: what was written there cannot be read again.")


def _pack_to_disk(
    file: ModelFile, limit_mib: int | None, size: int, progress: Callable[[str, float], None] | None
) -> None:
    from models.packing import pack_to  # imports the compiler

    time.sleep(unsettled_s(_newest_ns(file)))
    while True:
        try:
            with _writer_for(file, size, limit_mib) as writer:
                pack_to(file, writer, progress)
            return
        except _BusyError as reason:
            if progress is not None:
                progress(f"waiting: {reason}", 0.0)
            time.sleep(_POLL_S)
            if os.path.exists(_path(file)):  # it packed the same model
                return
        except _GivenUpError as reason:
            raise OutOfMemoryError(f"{file.path.name} does not fit into memory, nor on the disk: {reason}.") from reason


def is_kept(file: ModelFile, limit_mib: int | None) -> bool:
    """Whether a model's packed weights are worth keeping, and may be. limit_mib: the setting, 0 is off."""
    return limit_mib != 0 and file.loaded_bytes >= LEAST_BYTES


def find_packed(file: ModelFile, limit_mib: int | None) -> PackedWeights | None:
    """A model's packed weights, if they are on disk; verifying them starts here, see PackedWeights.check.

    limit_mib: the setting; 0 is off. A file that is damaged or belongs to another model is removed.
    """
    if limit_mib == 0:
        return None
    path = _path(file)
    try:
        with _opened(path) as stored:
            if not (is_private(stored.fileno()) and is_private(path.parent)):
                log.warning("%s is not used: others could have written it", path)
                return None
            found = map_packed(stored.fileno(), usable_cores())
            if found.about.get("key") != path.stem:
                raise DamagedError("it belongs to another model")
            with contextlib.suppress(OSError):  # the folder is read-only
                os.utime(path)
            return found
    except FileNotFoundError:
        pass
    except DamagedError as error:
        _remove_damaged(path, error)
    except OSError as error:
        log.info("%s cannot be read: %s", path, error.strerror)
    return None


class PackedKeeper:
    """Writes a model's packed weights to disk in the background, until it is stopped."""

    def __init__(self, file: ModelFile, packed: Mapping[str, NDArray[Any]], limit_mib: int | None) -> None:
        """packed: matrices by name, see WeightLoader.packed."""
        self._stopped, self._hurried = threading.Event(), threading.Event()
        self.bytes = sum(each.nbytes for each in packed.values())
        self._file = file
        self._packed = dict(packed)
        self._limit_mib = limit_mib
        self._thread = threading.Thread(target=self._keep, name="packed-keeper", daemon=True)
        _keepers.add(self)
        self._thread.start()

    def stop(self) -> None:
        """Abandon what is not yet written, and release the weights. Idempotent."""
        self._stopped.set()
        self._hurried.set()
        self._thread.join()
        _keepers.discard(self)

    def wait(self, seconds: float) -> None:
        """Write without delay, and wait until everything is written or abandoned, for at most `seconds`."""
        self._hurried.set()
        self._thread.join(seconds)

    def _keep(self) -> None:
        self._hurried.wait(_WAIT_S)
        if self._stopped.is_set():
            return
        lower_thread_priority()
        try:
            with _writer_for(self._file, self.bytes, self._limit_mib) as writer:
                for name, matrix in self._packed.items():
                    writer.put(name, parts_of(matrix, self._go_on))
        except (_GivenUpError, OSError) as reason:
            log.info("The packed weights are not kept: %s", reason)
        finally:
            self._packed.clear()

    def _go_on(self) -> None:
        if self._stopped.is_set():
            raise _GivenUpError("the model was closed")
        if available_memory() < LEAST_MEMORY:
            raise _GivenUpError("memory is short")


_keepers: set[PackedKeeper] = set()


def finish_keeping() -> None:
    """Wait a few seconds until small models' weights are written: for processes that end after a short answer."""
    for keeper in [each for each in _keepers if each.bytes <= _SOON_BYTES]:
        keeper.wait(_PATIENCE_S)


def keep_packed(file: ModelFile, packed: Mapping[str, NDArray[Any]], limit_mib: int | None) -> PackedKeeper | None:
    """Begin to keep a model's packed weights, unless they are small, there already, or the file is just being made."""
    if not is_kept(file, limit_mib) or unsettled_s(_newest_ns(file)) or os.path.exists(_path(file)):
        return None
    return PackedKeeper(file, packed, limit_mib)


def limit_bytes(limit_mib: int | None) -> int:
    """Most bytes that all packed files may take. limit_mib: the setting."""
    if limit_mib is not None:
        return limit_mib * 2**20
    room = shutil.disk_usage(
        next(each for each in (packed_folder(), *packed_folder().parents) if os.path.exists(each))
    ).free
    return min(DEFAULT_BYTES, int(DEFAULT_SHARE * (room + sum(each.bytes for each in packed_files()))))


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A packed file on disk. used_ns: when last loaded. files: states of the model's files then; () if damaged."""

    path: Path
    bytes: int
    used_ns: int
    files: tuple[tuple[str, int, int, int, int], ...]

    @property
    def orphaned(self) -> bool:
        """Whether the model's files are missing or changed, so that this file will never be loaded again."""
        for name, *stamp in self.files:
            try:
                if tuple(stamp) != FileState.now(Path(name)).stamp:
                    return True
            except OSError:
                return True
        return not self.files


def packed_files() -> list[StoredWeights]:
    """All packed files, least recently used first. Other files in the folder are left out."""
    found = []
    with contextlib.suppress(OSError):
        for path in packed_folder().iterdir():
            if PACKED_NAME.fullmatch(path.name) and not path.name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    state = path.lstat()
                    if stat.S_ISREG(state.st_mode):
                        found.append(StoredWeights(path, disk_bytes(state), state.st_mtime_ns, _files_of(path)))
    return sorted(found, key=lambda each: each.used_ns)


def remove_orphans() -> list[StoredWeights]:
    """Remove the packed files of missing or changed models; return the remaining ones, ordered as packed_files."""
    for each in packed_files():
        if each.orphaned:
            _removed(each.path)
    return packed_files()


def _remove_damaged(path: Path, reason: DamagedError | OSError) -> None:
    log.warning("%s is not used, and removed: %s. The model is packed again.", path, reason)
    if not _removed(path):
        with contextlib.suppress(OSError):  # it may be renamed, and goes with the next file that is written
            replace(path, _unfinished(path.parent))


def _removed(path: Path) -> bool:
    """Remove a packed file, and return whether it is gone; on Windows it stays while a program has mapped it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.info("%s stays for now: %s", path, error.strerror)
    return not os.path.lexists(path)  # it may be removed only when the last program closes it


def _unfinished(folder: Path) -> Path:
    return folder / f"{TEMPORARY}{secrets.token_hex(4)}.packed"


class _GivenUpError(Exception):
    """Why packed weights are not written."""


class _BusyError(_GivenUpError):
    """Another writer holds the lock."""


@contextlib.contextmanager
def _writer_for(file: ModelFile, size: int, limit_mib: int | None) -> Iterator[PackedWriter]:
    """A writer of a model's packed file, which exists if the block succeeds. Older files are evicted to make room.

    Raises _BusyError if another process is writing, _GivenUpError if there is no space; OSError.
    """
    from filelock import FileLock, Timeout  # not above: most loads do not write

    path = _path(file)
    folder = path.parent
    make_folder(folder)
    if not is_private(folder):
        raise _GivenUpError(f"{folder} is not this user's alone")
    try:
        with FileLock(folder / ".lock", timeout=0, mode=0o600):
            for each in folder.iterdir():  # left by killed processes: this one holds the lock
                if PACKED_NAME.fullmatch(each.name) and each.name.startswith(TEMPORARY):
                    _removed(each)
            _make_room(path, size, limit_mib)
            unfinished = _unfinished(folder)
            fd = open_own(unfinished, new=True)
            try:
                writer = PackedWriter(fd)
                yield writer
                writer.finish({"key": path.stem, "files": _states(file)})
                replace(unfinished, path)
                sync_folder(folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    unfinished.unlink()
                raise
            finally:
                os.close(fd)
    except Timeout:
        raise _BusyError("another process is writing packed weights") from None


def _make_room(path: Path, size: int, limit_mib: int | None) -> None:
    limit = limit_bytes(limit_mib)
    if size > limit:
        raise _GivenUpError(f"they take {size >> 20:,} MiB, and the setting packed_mib allows {limit >> 20:,}")
    stored, wanted = remove_orphans(), list[StoredWeights]()
    excess = sum(each.bytes for each in stored) + size - limit
    while sum(each.bytes for each in wanted) < excess:
        wanted.append(stored[len(wanted)])
    if shutil.disk_usage(path.parent).free + sum(each.bytes for each in wanted) < FREE_TIMES * size:
        raise _GivenUpError("the disk is nearly full")
    for each in stored:
        if excess > 0 and _removed(each.path):
            excess -= each.bytes
    if excess > 0:
        raise _GivenUpError("older ones are loaded by programs, and can be removed when those end")


def _path(file: ModelFile) -> Path:
    made_of = json.dumps([_states(file), code_digest()])
    return packed_folder() / f"{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.packed"


def _newest_ns(file: ModelFile) -> int:
    return max(max(each.modified_ns, each.changed_ns) for each in file.states)


def _states(file: ModelFile) -> list[tuple[str, int, int, int, int]]:
    return [(str(each.path), *each.stamp) for each in file.states]


@cache
def code_digest() -> str:
    """What decides how weights are packed: our sources and the processor. Asked several times at each load."""
    digest = hashlib.sha256(f"{cache_directory().name} {np.__version__}".encode())
    for pattern in _DECIDING:
        for source in sorted(_ROOT.glob(pattern)):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _opened(path: Path) -> FileIO:
    """Open a packed file for reading. Raises OSError."""
    return open(open_regular(path, follow_links=False), "rb", buffering=0)


def _files_of(path: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """The states of the model's files that a packed file was made from; () if it cannot be read."""
    try:
        with _opened(path) as stored:
            return tuple(tuple(each) for each in read_about(stored.fileno())["files"])
    except (OSError, DamagedError, KeyError, TypeError):
        return ()
