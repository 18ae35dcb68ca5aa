"""KV that survives a restart: segments of conversations as files, found by their token ids.

A segment holds the KV of tokens start..stop-1 after the tokens 0..start-1. For models with states it may also hold the
state after them, which is only read if a sequence continues from there. Its file is named by two digests,
<tokens before>.<tokens up to its end>.kv, so the segments of all conversations form a tree on disk. It contains all its
token ids from 0 on, which are compared before use: nothing is ever restored for other tokens. A file <tokens>.trunk
pins the segments that lead to these tokens; its modification time is their last use. A file <tokens>.pin pins them for
requests, until the time that it states (localllm.engine.pins.PinRecord). Files are written by atomic rename
and have a checksum. Several processes may share the folder, and a crash leaves at most a temporary file. A full or
broken disk turns the cache off, with one warning.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import platformdirs

from gguf_io.model_file import FileState
from gguf_io.runner_info import RunnerInfo
from gguf_io.system import make_folder, read_file
from localllm.engine.disk_eviction import ROOT, StoredFile, first_to_go, pinned
from localllm.engine.file_digest import FileDigest
from localllm.engine.pins import Pin, PinRecord
from localllm.engine.prefix_cache import PREFIX_SHARE, common_prefix
from localllm.engine.segment_file import DamagedSegmentError, read_header, read_kv, read_state, write_segment
from localllm.files import TEMPORARY, listed, stale, write_whole

log = logging.getLogger(__name__)

SEGMENT_TOKENS = 256
# States are large, so only those after this many tokens, its halves and its multiples are stored, and at ends.
STATE_TOKENS = 1024
DEFAULT_BYTES = 4 * 2**30
DEFAULT_SHARE = 0.05

_DIGEST = 16
_RECORD_BYTES = 1024
_DIGESTS = "digests.json"  # of model files, below the root
# Files with other names are never read, counted or removed.
_FOLDER_NAME = re.compile(rf"[0-9a-f]{{{2 * _DIGEST}}}")
_SEGMENT_NAME = re.compile(rf"([0-9a-f]{{{2 * _DIGEST}}})\.([0-9a-f]{{{2 * _DIGEST}}})\.kv")
_PIN_NAME = re.compile(rf"([0-9a-f]{{{2 * _DIGEST}}})\.pin")
_PREFIX_NAME = re.compile(rf"([0-9a-f]{{{2 * _DIGEST}}})\.trunk")


@dataclass(frozen=True, slots=True)
class Segment:
    """A file with the KV of tokens start..stop-1. Those before `useful` match the requested tokens.

    kv_bytes, state_bytes: of the KV, and of the state after the last token, 0 for none.
    """

    path: Path
    start: int
    stop: int
    useful: int
    kv_bytes: int
    state_bytes: int


class DiskCache:
    """The segments of one identity in a folder below `root`.

    identity: everything that stored KV depends on except the tokens and the model's files. digest: of these files, None
    if the identity covers them; until it is known, nothing is found or stored. limit_bytes: for all identities
    together; None takes the lesser of 4 GiB and 5 % of the free disk. whole: states cannot be truncated, so a
    segment starts at 0. pinned_share: of the limit, for what requests pin. clock: seconds since 1970. `find` is
    for the engine's thread, `store` and `pin` for one writer's, `load` for any.
    """

    def __init__(
        self,
        root: Path,
        identity: str,
        limit_bytes: int | None = None,
        whole: bool = False,
        digest: FileDigest | None = None,
        pinned_share: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._pinned_share, self._clock = pinned_share, clock
        self._identity = identity
        self._whole = whole
        self.digest = digest or FileDigest((), root / _DIGESTS)
        self._opened: Path | None = None
        self._tidied = False
        self._works = True
        try:
            make_folder(root)
            if limit_bytes is None:
                limit_bytes = min(DEFAULT_BYTES, int(shutil.disk_usage(root).free * DEFAULT_SHARE))
        except OSError as error:
            self._turn_off(error)
        self._limit = limit_bytes or 0

    @property
    def enabled(self) -> bool:
        """Whether anything can still be stored: the disk works, and the digest has not failed."""
        return self._works and not self.digest.failed

    @property
    def ready(self) -> bool:
        """Whether the digest of the model's files is known."""
        return self.digest.value is not None

    def apart(self, namespace: str, adapters: Sequence[tuple[Sequence[FileState], float]] = ()) -> "DiskCache":
        """The same tier for a namespace, which shares no segments with others. adapters: files and weights."""
        identity, digest = f"{self._identity}/{namespace}" if namespace else self._identity, self.digest
        if adapters:
            files = [file for files, _ in adapters for file in files]
            digest = FileDigest(files, self._root / _DIGESTS, digest)
            identity += f"/{[weight for _, weight in adapters]}"
        return self._like(identity, self._whole, digest)

    def of_states(self) -> "DiskCache":
        """The same tier for a model whose states cannot be truncated."""
        return self._like(self._identity, True, self.digest)

    def _like(self, identity: str, whole: bool, digest: FileDigest) -> "DiskCache":
        return DiskCache(self._root, identity, self._limit, whole, digest, self._pinned_share, self._clock)

    @property
    def _folder(self) -> Path:
        """The folder of the segments, created if `cache --free kv` has removed it. Raises OSError."""
        if self._opened is None:
            name = hashlib.blake2b(f"{self._identity}/{self.digest.value}".encode(), digest_size=_DIGEST).hexdigest()
            self._opened = self._root / name
        make_folder(self._opened)
        return self._opened

    def _tidy(self) -> None:
        """Remove what ended processes left, and pins whose time is over: once, before the first segment is written."""
        if not self._tidied:
            self._tidied = True
            for path in listed(self._folder):
                if path.name.startswith(TEMPORARY) and path.name.endswith(".tmp") and stale(path):
                    path.unlink(missing_ok=True)
            self._pins()  # removes old ones

    def find(self, tokens: Sequence[int]) -> list[Segment]:
        """Return the chain of segments from 0 that matches the most tokens. Reads headers only."""
        children = self._children() if tokens else {}
        chain: list[Segment] = []
        parent, at = ROOT, 0
        while at < len(tokens):
            best: Segment | None = None
            for path in children.get(parent, ()):
                header = read_header(path)
                if header is None or header.tokens[:at] != list(tokens[:at]):
                    continue
                stop, common = len(header.tokens), common_prefix(header.tokens, tokens)
                if self._whole and common < stop:
                    continue
                if common > at and (best is None or (common, -stop) > (best.useful, -best.stop)):
                    best = Segment(path, at, stop, common, header.kv_bytes, header.state_bytes)
            if best is None:
                break
            chain.append(best)
            if best.useful < best.stop or self._whole:
                break
            parent, at = best.path.name.split(".")[1], best.stop
        return chain

    def load(self, segment: Segment) -> memoryview | None:
        """Return a segment's KV and mark it as used; None if it is missing or damaged. Deletes a damaged file."""
        return self._read(segment, lambda: read_kv(segment.path, segment.stop, segment.kv_bytes))

    def load_state(self, segment: Segment) -> memoryview | None:
        """Return the state after a segment's last token, as `load` returns its KV."""
        sizes = segment.stop, segment.kv_bytes, segment.state_bytes
        return self._read(segment, lambda: read_state(segment.path, *sizes))

    def _read(self, segment: Segment, read: Callable[[], memoryview]) -> memoryview | None:
        try:
            data = read()
        except OSError as error:
            log.info("A KV segment cannot be read: %s", error)
            return None
        except DamagedSegmentError:
            log.warning("Removing %s: its checksum is wrong", segment.path)
            with contextlib.suppress(OSError):  # the folder is read-only
                segment.path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(segment.path)
        return data

    def missing(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the segments that must be stored so that all tokens are on disk."""
        if self._whole:
            if len(tokens) >= SEGMENT_TOKENS and not any(one.stop == len(tokens) for one in self.find(tokens)):
                yield 0, len(tokens)
            return
        yield from missing_segments(((one.stop, one.useful) for one in self.find(tokens)), len(tokens))

    def store(self, tokens: Sequence[int], start: int, kv: bytes, state: bytes = b"") -> None:
        """Write the KV of tokens[start:] as a segment, with the state after them, then evict down to the limit.

        Does nothing if the preceding segment is missing, for example evicted, or if this one alone exceeds the limit.
        """
        parent = _digest(tokens[:start]) if start else ROOT
        if not self.enabled or not self.ready or len(kv) + len(state) > self._limit:
            return
        try:
            self._tidy()
            if start and _segment(self._folder, parent) is None:
                return
            path = self._folder / f"{parent}.{_digest(tokens)}.kv"
            write_segment(path, tokens, kv, state)
            self._remove_shorter(parent, tokens)
            self._shrink()
        except OSError as error:
            self._turn_off(error)

    def pin(self, tokens: Sequence[int]) -> None:
        """Pin the segments of a shared prefix, except a partial last one: they are evicted after unpinned ones."""
        end = self._pinnable(tokens)
        if not end:
            return
        try:
            path = self._folder / f"{_digest(end)}.trunk"
            with contextlib.suppress(FileNotFoundError):  # it is new, or another process has removed it
                os.utime(path)
                return
            model = next((str(file.path) for file in self.digest.files), "")
            about = SharedPrefix(model, len(tokens), time.time())
            write_whole(path, json.dumps(asdict(about)).encode(), lasting=False)
        except OSError as error:
            self._turn_off(error)

    def keep(self, tokens: Sequence[int], pin: Pin) -> None:
        """Pin the segments of these tokens for a request, except a partial last one: they are evicted last."""
        end = self._pinnable(tokens)
        if not end or not self._pinned_share:
            return
        now = self._clock()
        made = PinRecord(now + pin.seconds, pin.seconds, pin.priority)
        try:
            path = self._folder / f"{_digest(end)}.pin"
            if before := _pin_record(path, now):
                longer = max(before, made, key=lambda one: one.until)
                made = replace(longer, priority=min(before.priority, made.priority))
            write_whole(path, json.dumps(asdict(made)).encode(), lasting=False)
        except OSError as error:
            self._turn_off(error)

    def _pinnable(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens up to whose end whole segments are stored; none if nothing can be stored."""
        if not self.enabled or not self.ready:
            return ()
        return tokens if self._whole else tokens[: len(tokens) // SEGMENT_TOKENS * SEGMENT_TOKENS]

    def _children(self) -> dict[str, list[Path]]:
        """All segments by the digest of the preceding tokens."""
        found: dict[str, list[Path]] = defaultdict(list)
        if self.enabled and self.ready:
            try:
                for entry in os.scandir(self._folder):
                    if name := _SEGMENT_NAME.fullmatch(entry.name):
                        found[name[1]].append(Path(entry.path))
            except OSError as error:
                self._turn_off(error)
        return found

    def _remove_shorter(self, parent: str, tokens: Sequence[int]) -> None:
        """Remove shorter versions of a conversation's last segment, which is stored again when it has grown.

        If states cannot be truncated, the longest of these stays, because its prompt may be answered again.
        """
        shorter = []
        for path in self._children()[parent]:
            header = read_header(path)
            if header is None or (self._whole and any(os.path.exists(beside) for beside in _pins_of(path))):
                continue
            length = len(header.tokens)
            if length < len(tokens) and header.tokens == list(tokens[:length]):
                shorter.append((length, path))
        for _, path in sorted(shorter)[: -1 if self._whole else None]:
            path.unlink(missing_ok=True)

    def _shrink(self) -> None:
        """Delete segments of all models until the total is within the limit."""
        files = _stored_files(self._root, _SEGMENT_NAME)
        excess = sum(file.size for file in files) - self._limit
        if excess <= 0:
            return
        shared = [file.path for file in sorted(_stored_files(self._root, _PREFIX_NAME), key=lambda file: -file.used)]
        kept = (
            pinned(files, shared, int(PREFIX_SHARE * self._limit)),
            pinned(files, self._pins(), int(self._pinned_share * self._limit)),
        )
        for size, path in first_to_go(files, *kept):
            if excess <= 0:
                return
            for gone in (path, *_pins_of(path)):
                gone.unlink(missing_ok=True)
            excess -= size

    def _pins(self) -> list[Path]:
        """The records of what requests pin, highest priority first, then latest use. Removes old and damaged ones."""
        now, found = self._clock(), []
        for file in _stored_files(self._root, _PIN_NAME):
            if record := _pin_record(file.path, now):
                found.append((record.priority, record.seconds - record.until, file.path))
            else:
                with contextlib.suppress(OSError):  # the folder is read-only
                    file.path.unlink()
        return [path for _, _, path in sorted(found)]

    def _turn_off(self, error: OSError) -> None:
        if self._works:
            self._works = False
            log.warning("KV is no longer kept on disk: %s: %s", self._root, error.strerror)


def _pins_of(segment: Path) -> list[Path]:
    """The files that pin a segment, if they exist."""
    end = segment.name.split(".")[1]
    return [segment.with_name(f"{end}.{kind}") for kind in ("trunk", "pin")]


def _pin_record(path: Path, now: float) -> PinRecord | None:
    """What a record says; None for one whose time is over, and for one that is damaged or gone."""
    try:
        record = PinRecord(**json.loads(read_file(path, _RECORD_BYTES)))
        return record if record.holds(now) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def missing_segments(stored: Iterable[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the segments to store so that `length` tokens are stored.

    stored: the stop of each segment of the chain that matches the most tokens, and the number of matching tokens up to
    there. A segment that is not full is stored again once the conversation has grown.
    """
    start = 0
    for stop, useful in stored:
        if useful == stop and (stop % SEGMENT_TOKENS == 0 or stop == length):
            start = stop
    yield from ((at, min(at + SEGMENT_TOKENS, length)) for at in range(start, length, SEGMENT_TOKENS))


def disk_cache_of(info: RunnerInfo, pinned_share: float) -> DiskCache:
    """The user's disk tier for KV that a runner computes. pinned_share: of its size, for what requests pin."""
    return DiskCache(disk_cache_folder(), info.kv_layout, digest=digest_of(info.kv_files), pinned_share=pinned_share)


def digest_of(files: Sequence[FileState]) -> FileDigest:
    """The digest of a model's files, which is stored beside the disk tier."""
    return FileDigest(files, disk_cache_folder() / _DIGESTS)


def disk_cache_folder() -> Path:
    """The folder that all processes of this user share, e.g. ~/.cache/localllm/kv."""
    return Path(platformdirs.user_cache_dir("localllm", appauthor=False)) / "kv"


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A pinned shared prefix: the model's file, the number of tokens, and the last use (seconds since 1970)."""

    model: str
    tokens: int
    used: float


def stored_prefixes(model: Path) -> list[SharedPrefix]:
    """A model file's shared prefixes whose pinned segments are all still on disk, most recently used first."""
    found = []
    for file in _stored_files(disk_cache_folder(), _PREFIX_NAME):
        try:
            prefix = SharedPrefix(**json.loads(read_file(file.path)))
        except (OSError, ValueError, TypeError):  # another process removed it, or it is damaged
            continue
        if prefix.model == str(model) and _leads_to(file.path.parent, file.path.name.partition(".")[0]):
            found.append(replace(prefix, used=file.used / 1e9))
    return sorted(found, key=lambda prefix: -prefix.used)


def _leads_to(folder: Path, digest: str) -> bool:
    """Whether a folder has the whole chain of segments up to this digest."""
    while digest != ROOT:
        before = _segment(folder, digest)
        if before is None:
            return False
        digest = before.name.split(".")[0]
    return True


def _segment(folder: Path, digest: str) -> Path | None:
    """The segment in a folder that ends with this digest."""
    return next((path for path in listed(folder) if path.name.endswith(f".{digest}.kv")), None)


def _stored_files(root: Path, name: "re.Pattern[str]") -> list[StoredFile]:
    """The files of all models with names of the given form in folders of the disk tier."""
    files = []
    for folder in listed(root):
        for path in listed(folder) if _FOLDER_NAME.fullmatch(folder.name) else ():
            if name.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another process deleted it
                    state = path.stat()
                    files.append(StoredFile(path, state.st_size, state.st_mtime_ns))
    return files


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(np.array(tokens, "<i8").tobytes(), digest_size=_DIGEST).hexdigest()
