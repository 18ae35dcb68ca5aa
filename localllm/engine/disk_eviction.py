"""The order in which the disk tier evicts segments when it is over its limit.

Segments of all models form trees by their names, see disk_cache: <tokens before>.<tokens up to its end>.kv. A segment
is useless without those before it, so they are evicted after it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = "0" * 32  # the first part of the name of a segment that starts at 0


# The depth before a segment that no chain of segments from the first token leads to.
_LED_TO_BY_NOTHING = -(2**30)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file. size: in bytes. used: time of the last use, in nanoseconds."""

    path: Path
    size: int
    used: int


def first_to_go(files: Sequence[StoredFile], *kept: Collection[Path]) -> list[tuple[int, Path]]:
    """Sizes and paths of segments in order of eviction: unreachable, then least recently used, then each `kept`."""
    before = _before(files)
    depths: dict[Path, int] = {}
    for path in before:
        way: list[Path] = []
        at: Path | None = path
        while at is not None and at not in depths:
            way.append(at)
            depths[at] = _LED_TO_BY_NOTHING  # names in a damaged folder may form a cycle
            at = before[at]
        depth = depths[at] if at is not None else (0 if way and way[-1].name.startswith(ROOT) else _LED_TO_BY_NOTHING)
        for each in reversed(way):
            depth = depths[each] = depth + 1
    used = {file.path: file.used for file in files}
    for path in sorted(used, key=depths.__getitem__, reverse=True):
        if (parent := before[path]) is not None:
            used[parent] = max(used[parent], used[path])

    def worth(file: StoredFile) -> tuple[int, bool, int, int]:
        rank = max((number for number, paths in enumerate(kept, 1) if file.path in paths), default=0)
        return rank, depths[file.path] > 0, used[file.path], -depths[file.path]

    return [(file.size, file.path) for file in sorted(files, key=worth)]


def pinned(files: Sequence[StoredFile], pins: Iterable[Path], most: int) -> set[Path]:
    """The segments that pins lead to, up to `most` bytes: those of the first pin first, each from its start.

    pins: files <tokens up to its end>.trunk or .pin beside their segments.
    """
    before, ends = _before(files), _ends(files)
    sizes = {file.path: file.size for file in files}
    found: set[Path] = set()
    for pin in pins:
        way: list[Path] = []
        at = ends.get((pin.parent, pin.name.partition(".")[0]))
        while at is not None and at not in way:
            way.append(at)
            at = before[at]
        for path in reversed(way):
            if path not in found and (most := most - sizes[path]) < 0:
                return found
            found.add(path)
    return found


def _ends(files: Sequence[StoredFile]) -> dict[tuple[Path, str], Path]:
    """Segments by their folder and the digest of all tokens up to their end."""
    return {(file.path.parent, file.path.name.split(".")[1]): file.path for file in files}


def _before(files: Sequence[StoredFile]) -> dict[Path, Path | None]:
    """The segment before each, None where there is none."""
    ends = _ends(files)
    return {file.path: ends.get((file.path.parent, file.path.name.split(".")[0])) for file in files}
