"""A digest of the whole content of a model's files, computed once, in the background, and stored.

SHA-256 is the standard library's fastest digest on processors with instructions for it.
"""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gguf_io.model_file import FileState
from gguf_io.system import lower_thread_priority, make_folder, open_regular, read_file
from localllm.files import unsettled_s, write_whole

log = logging.getLogger(__name__)

MOST_KEPT = 512
_READ_BYTES = 1 << 20
_LOWEST_PRIORITY = 19


class FileDigest:
    """One digest of several files, in the state in which they were opened.

    value: None until it is known, and forever if a file was changed or replaced since. A digest computed before is
    known at once: `store` has it with the file's size, times and inode. files: as passed in. after: a digest of other
    files that this one includes.
    """

    def __init__(self, files: Sequence[FileState], store: Path, after: "FileDigest | None" = None) -> None:
        self.value: str | None = None
        self.files = files
        self._store = store
        self._known: Callable[[], None] = lambda: None
        self._stopped = threading.Event()
        self._ended = threading.Event()
        kept = _read(store)
        self._after = after
        digests = [after.value] if after else []
        for file in files:
            digests.append(_kept(kept, file))
        if None not in digests:
            self.value = _joined(digests)
            self._ended.set()
        else:
            threading.Thread(target=self._compute, name="file-digest", daemon=True).start()

    @property
    def failed(self) -> bool:
        """Whether computing the value has failed or was stopped."""
        return self._ended.is_set() and self.value is None

    def when_known(self, known: Callable[[], None]) -> None:
        """Call `known` on the computing thread when the value is set; never if it is already set."""
        self._known = known

    def wait(self, seconds: float) -> None:
        """Wait until the value is known or has failed, at most `seconds`."""
        self._ended.wait(seconds)

    def stop(self) -> None:
        """Stop computing. Idempotent."""
        self._stopped.set()

    def _compute(self) -> None:
        lower_thread_priority()
        try:
            digests = [_kept(_read(self._store), file) or self._digest(file) for file in self.files]
            if self._after:
                self._after._ended.wait()
                digests.insert(0, self._after.value)
            if None not in digests:
                self.value = _joined(digests)
        except OSError as error:
            log.info("A model file could not be read for its digest: %s", error)
        except Exception as error:  # such as MemoryError: this thread must not end with a traceback
            log.warning("KV is not kept on disk: the digest of the model failed: %s: %s", type(error).__name__, error)
        finally:
            self._ended.set()
        if self.value is not None:
            self._known()

    def _digest(self, file: FileState) -> str | None:
        """Hash a file and store the digest; None if the file is not the one that was opened, or after `stop`."""
        digest = hashlib.sha256()
        with open(open_regular(file.path), "rb", buffering=0) as source:
            was_settled = not unsettled_s(max(file.modified_ns, file.changed_ns))
            if FileState.of(file.path, source.fileno()) != file:
                return None
            buffer = bytearray(_READ_BYTES)
            while (count := source.readinto(buffer)) and not self._stopped.is_set():
                digest.update(memoryview(buffer)[:count])
            if self._stopped.is_set() or FileState.of(file.path, source.fileno()) != file:
                return None
        if was_settled:
            self._keep(file, digest.hexdigest())
        return digest.hexdigest()

    def _keep(self, file: FileState, digest: str) -> None:
        kept = _read(self._store)
        kept.pop(str(file.path), None)
        kept = {path: entry for path, entry in kept.items() if os.path.exists(path)}  # never raises
        kept[str(file.path)] = [*file.stamp, digest]
        newest = dict([*kept.items()][-MOST_KEPT:])
        try:
            make_folder(self._store.parent)
            write_whole(self._store, json.dumps(newest).encode(), lasting=False)
        except OSError as error:
            log.info("The digest of %s is not kept: %s", file.path, error)


def _read(store: Path) -> dict[str, Any]:
    """The stored digests; empty if they cannot be read or are damaged."""
    try:
        kept = json.loads(read_file(store))
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _kept(kept: dict[str, Any], file: FileState) -> str | None:
    match kept.get(str(file.path)):
        case [*stamp, str(digest)] if stamp == [*file.stamp] and len(digest) == 64:
            return digest
    return None


def _joined(digests: Sequence[str | None]) -> str:
    return hashlib.sha256("".join(map(str, digests)).encode()).hexdigest()
