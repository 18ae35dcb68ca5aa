"""Everything that localllm keeps on the disk: where, how much, what bounds it, and how it is freed."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from localllm.engine.disk_cache import DEFAULT_BYTES, DEFAULT_SHARE, disk_cache_folder
from localllm.errors import RequestError
from localllm.library import places
from localllm.settings import Settings, config_path, sessions_path


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """A folder or a file of ours. bytes: what it takes on the disk. bound: what keeps it small, in a few words."""

    what: str
    path: Path
    bytes: int
    bound: str


def stored_places(settings: Settings) -> list[StoredPlace]:
    """Every place that is written to, whether it is there yet or not."""
    store = places.own_store(settings)
    chats = sessions_path()
    limit = f"at most {DEFAULT_BYTES >> 30} GiB or {DEFAULT_SHARE:.0%} of the free disk"
    unfinished = size_of(store / "partial")
    found = (
        ("models", store, size_of(store) - unfinished, "localllm rm NAME"),
        ("unfinished", store / "partial", unfinished, "localllm rm --unfinished"),
        ("kernels", _kernels(), size_of(_kernels()), "those unused for a month go; localllm cache --free kernels"),
        ("kv", disk_cache_folder(), size_of(disk_cache_folder()), f"{limit}; localllm cache --free kv"),
        ("chats", chats, sum(map(size_of, chats.parent.glob("sessions.db*"))), "deleted in the chat"),
        ("settings", config_path(), size_of(config_path()), "yours"),
    )
    return [StoredPlace(*row) for row in found]


def emptied(what: str) -> int:
    """Empty "kernels" or "kv" and return the bytes that became free. Raises RequestError for other words."""
    folders = {"kernels": _kernels, "kv": disk_cache_folder}
    if what not in folders:
        raise RequestError(f"{what!r} cannot be emptied; {' and '.join(folders)} can. Models go with `localllm rm`.")
    folder = folders[what]()
    before = size_of(folder)
    # By what we name them: a folder that a variable leads to may hold other things.
    for path in folder.glob("[0-9a-f]" * 24) if what == "kernels" else folder.glob("[0-9a-f]" * 32):
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise RequestError(f"{path} cannot be removed: {error.strerror}. Remove it by hand.") from error
    return before - size_of(folder)


def size_of(path: Path) -> int:
    """Bytes on the disk of a file, or below a folder; files with holes count as what they take."""
    found = path.rglob("*") if path.is_dir() else iter([path])
    return sum(each.lstat().st_blocks * 512 for each in found if each.is_file() and not each.is_symlink())


def _kernels() -> Path:
    from cpu_kernels.kernel_cache import cache_root  # takes a moment to import

    return cache_root()
