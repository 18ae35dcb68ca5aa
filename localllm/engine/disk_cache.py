"""KV that survives a restart: segments of conversations as files, found by their token ids.

A segment holds the KV of tokens start..stop-1 behind the tokens 0..start-1. Its file is named by two digests,
<tokens before>.<tokens up to its end>.kv, so that the segments of all conversations form a tree on disk. It repeats all
its token ids, which are compared before use: nothing is ever restored for other tokens. Files appear under their name
complete or not at all and carry a checksum; several processes may share the folder, and a crash leaves at most a
temporary file behind. A full or broken disk turns the cache off, with one warning.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs

from localllm.engine.prefix_cache import common_prefix
from localllm.files import TEMPORARY, stale, write_whole

log = logging.getLogger(__name__)

SEGMENT_TOKENS = 256
DEFAULT_BYTES = 4 * 2**30
DEFAULT_SHARE = 0.05

_MAGIC = b"LLMKV\x00\x00\x01"
_DIGEST = 16
_ROOT = "0" * (2 * _DIGEST)
_HEX = "[0-9a-f]" * (2 * _DIGEST)  # a digest, as glob has it


@dataclass(frozen=True, slots=True)
class Segment:
    """A file that holds KV for tokens start..stop-1, of which the first `useful` - start are those asked for."""

    path: Path
    start: int
    stop: int
    useful: int


class DiskCache:
    """The segments of one kv_identity in a folder below `root`.

    limit_bytes bounds all identities together; None takes 4 GiB or 5 % of the free disk, whichever is less. whole: what
    is stored cannot be cut, so that a segment begins at 0 and is of use whole or not at all. Reading belongs to the
    engine's thread, `store` to one writing thread.
    """

    def __init__(self, root: Path, kv_identity: str, limit_bytes: int | None = None, whole: bool = False) -> None:
        self._root = root
        self._identity = kv_identity
        self._whole = whole
        self._folder = root / hashlib.blake2b(kv_identity.encode(), digest_size=_DIGEST).hexdigest()
        self.enabled = True
        try:
            for folder in (root, self._folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if limit_bytes is None:
                limit_bytes = min(DEFAULT_BYTES, int(shutil.disk_usage(root).free * DEFAULT_SHARE))
            self._remove_stale()
        except OSError as error:
            self._turn_off(error)
        self._limit = limit_bytes or 0

    def apart(self, namespace: str) -> "DiskCache":
        """The same tier for a namespace, which shares no segment with others."""
        return DiskCache(self._root, f"{self._identity}/{namespace}", self._limit, self._whole)

    def of_states(self) -> "DiskCache":
        """The same tier for a model whose states cannot be cut."""
        return DiskCache(self._root, self._identity, self._limit, whole=True)

    def find(self, tokens: Sequence[int]) -> list[Segment]:
        """Return the chain of segments that begins at 0 and follows the tokens furthest. Reads headers only."""
        chain: list[Segment] = []
        parent, at = _ROOT, 0
        while self.enabled and at < len(tokens):
            best: tuple[int, int, Path] | None = None
            for path in self._children(parent):
                stored = _read_tokens(path)
                if stored is None or stored[:at] != list(tokens[:at]):
                    continue
                common = common_prefix(stored, tokens)
                if self._whole and common < len(stored):
                    continue
                if common > at and (best is None or (common, -len(stored)) > (best[0], -best[1])):
                    best = common, len(stored), path
            if best is None:
                break
            common, stop, path = best
            chain.append(Segment(path, at, stop, common))
            if common < stop or self._whole:
                break
            parent, at = path.name.split(".")[1], stop
        return chain

    def load(self, segment: Segment) -> bytes | None:
        """Return a segment's KV and mark it as used; None if it is gone, and it is removed if it is damaged."""
        try:
            data = segment.path.read_bytes()
            os.utime(segment.path)
        except OSError as error:
            log.info("A KV segment cannot be read: %s", error)
            return None
        body, checksum = data[:-_DIGEST], data[-_DIGEST:]
        if _checksum(body) != checksum:
            log.warning("Removing %s: its checksum is wrong", segment.path)
            segment.path.unlink(missing_ok=True)
            return None
        return body[len(_MAGIC) + 4 + 4 * segment.stop :]

    def missing(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the segments that must be stored so that all tokens are on disk."""
        if self._whole:
            if len(tokens) >= SEGMENT_TOKENS and not any(one.stop == len(tokens) for one in self.find(tokens)):
                yield 0, len(tokens)
            return
        start = 0
        for segment in self.find(tokens):
            if segment.useful == segment.stop and (segment.stop % SEGMENT_TOKENS == 0 or segment.stop == len(tokens)):
                start = segment.stop
        while start < len(tokens):
            stop = min(start + SEGMENT_TOKENS, len(tokens))
            yield start, stop
            start = stop

    def store(self, tokens: Sequence[int], start: int, kv: bytes) -> None:
        """Write the KV of tokens[start:] as one segment, then delete what is over the limit.

        Nothing is written behind a segment that is gone, such as one that the limit left no room for.
        """
        stop = len(tokens)
        parent = _digest(tokens[:start]) if start else _ROOT
        if not self.enabled or (start and not self._leads_to(parent)):
            return
        header = _MAGIC + stop.to_bytes(4, "little") + np.array(tokens, "<i4").tobytes()
        body = header + kv
        try:
            path = self._folder / f"{parent}.{_digest(tokens)}.kv"
            write_whole(path, body + _checksum(body), lasting=False)
            self._remove_shorter(parent, tokens)
            self._shrink()
        except OSError as error:
            self._turn_off(error)

    def _children(self, parent: str) -> list[Path]:
        try:
            return [Path(entry.path) for entry in os.scandir(self._folder) if entry.name.startswith(f"{parent}.")]
        except OSError as error:
            self._turn_off(error)
            return []

    def _leads_to(self, digest: str) -> bool:
        """Whether a segment ends there."""
        return any(self._folder.glob(f"*.{digest}.kv"))

    def _remove_shorter(self, parent: str, tokens: Sequence[int]) -> None:
        """A conversation's last segment is stored again when it has grown: the shorter one is of no more use.

        Of states that cannot be cut, the longest shorter one stays: its prompt may be answered again.
        """
        shorter = []
        for path in self._children(parent):
            stored = _read_tokens(path)
            if stored is not None and len(stored) < len(tokens) and stored == list(tokens[: len(stored)]):
                shorter.append((len(stored), path))
        for _, path in sorted(shorter)[: -1 if self._whole else None]:
            path.unlink(missing_ok=True)

    def _shrink(self) -> None:
        """Delete segments of all models until the limit is kept."""
        files = []
        for path in self._root.glob(f"{_HEX}/{_HEX}.{_HEX}.kv"):
            try:
                state = path.stat()
            except FileNotFoundError:  # another process deleted it
                continue
            files.append((state.st_mtime_ns, state.st_size, path))
        excess = sum(size for _, size, _ in files) - self._limit
        for size, path in _first_to_go(files) if excess > 0 else []:
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size

    def _remove_stale(self) -> None:
        for path in self._folder.glob(f"{TEMPORARY}*.tmp"):
            if stale(path):
                path.unlink(missing_ok=True)

    def _turn_off(self, error: OSError) -> None:
        if self.enabled:
            self.enabled = False
            log.warning("KV is no longer kept on disk: %s: %s", self._root, error.strerror)


def disk_cache_folder() -> Path:
    """The folder that all processes of this user share, e.g. ~/.cache/localllm/kv."""
    return Path(platformdirs.user_cache_dir("localllm", appauthor=False)) / "kv"


def _first_to_go(files: Sequence[tuple[int, int, Path]]) -> list[tuple[int, Path]]:
    """Sizes and paths of segments, those first that nothing leads to, then the least recently used.

    files: when each was used, its size and its path. Whoever uses a segment uses all before it, and without them it is
    of no use: so they go after it.
    """
    ends = {(path.parent, path.name.split(".")[1]): path for _, _, path in files}
    used = {path: when for when, _, path in files}
    places: dict[Path, tuple[bool, int]] = {}
    for when, _, path in files:
        at, depth = path, 0
        while (before := ends.get((path.parent, at.name.split(".")[0]))) and depth < len(files):
            used[before] = max(used[before], when)
            at, depth = before, depth + 1
        places[path] = at.name.startswith(_ROOT), -depth
    return [
        (size, path)
        for _, size, path in sorted(files, key=lambda file: (places[file[2]][0], used[file[2]], places[file[2]][1]))
    ]


def _read_tokens(path: Path) -> list[int] | None:
    """The token ids of a segment file, or None if it is gone or not one."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            count = int.from_bytes(file.read(4), "little")
            data = file.read(4 * count) if 4 * count < path.stat().st_size else b""
    except OSError:
        return None
    ids: list[int] = np.frombuffer(data, "<i4").tolist() if len(data) == 4 * count else []
    return ids or None


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(np.array(tokens, "<i4").tobytes(), digest_size=_DIGEST).hexdigest()


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()
