"""Everything that localllm keeps on disk: where, how much, what limits it, and how to free it."""

import contextlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from cpu_kernels.kernel_cache import cache_root
from gguf_io.system import disk_bytes
from localllm.engine.disk_cache import DEFAULT_BYTES, DEFAULT_SHARE, disk_cache_folder
from localllm.errors import RequestError
from localllm.files import TEMPORARY, listed, walked
from localllm.image_reader import DISK_BYTES as IMAGES_BYTES
from localllm.image_reader import IMAGE_NAME, image_folder
from localllm.library import places
from localllm.packed import DEFAULT_BYTES as PACKED_BYTES
from localllm.packed import DEFAULT_SHARE as PACKED_SHARE
from localllm.packed import PACKED_NAME, packed_folder
from localllm.semantic.store import store_path
from localllm.settings import config_path, indexes_folder, journal_path, sessions_path
from localllm.speed.kept import kept_path


def _kernels() -> Path:

    return cache_root()


def _speeds() -> Path:

    return kept_path()


# Of each cache: its folder, the names of its subfolders, None for a cache without, and the names of our files in them.
_CACHES = {
    "kernels": (_kernels, re.compile(r"[0-9a-f]{24}"), re.compile(r".+\.kernel")),
    "kv": (
        disk_cache_folder,
        re.compile(r"[0-9a-f]{32}"),
        re.compile(rf"[0-9a-f]{{32}}\.([0-9a-f]{{32}}\.kv|trunk|pin)|{re.escape(TEMPORARY)}.+"),
    ),
    "images": (image_folder, None, re.compile(rf"{IMAGE_NAME.pattern}|{re.escape(TEMPORARY)}.+")),
    "packed": (packed_folder, None, PACKED_NAME),
    "documents": (indexes_folder, None, re.compile(r"[0-9a-f]{32}\.db(-wal|-shm|\.lock)?")),
}


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """A folder or file of ours. bytes: its size on disk. bound: what limits its size, in a few words."""

    what: str
    path: Path
    bytes: int
    bound: str


def stored_places(where: places.Places, packed_mib: int | None) -> list[StoredPlace]:
    """Every place that localllm writes to, even if it does not exist yet. packed_mib: the setting."""
    store = places.own_store(where)
    chats, unfinished = sessions_path(), size_of(store / "partial")
    chats_bytes = sum(size_of(path) for path in listed(chats.parent) if path.name.startswith(chats.name))
    limit = f"at most {DEFAULT_BYTES >> 30} GiB or {DEFAULT_SHARE:.0%} of the free disk"
    found = (
        ("kernels", _kernels(), "removed when unused for a month; localllm cache --free kernels"),
        ("kv", disk_cache_folder(), f"{limit}; localllm cache --free kv"),
        ("images", image_folder(), f"at most {IMAGES_BYTES >> 30} GiB; localllm cache --free images"),
        ("packed", packed_folder(), f"{_packed_limit(packed_mib)}; localllm cache --free packed"),
        ("documents", indexes_folder(), "indexes of folders; localllm cache --free documents"),
        ("answers", store_path(), "of the semantic cache; localllm cache semantic --delete all"),
        ("changes", journal_path(), "what tools changed; removed after 30 days"),
        ("speeds", _speeds(), "a few lines for each number of threads; written by bench"),
        ("agents", chats.parent / "agents", "what launch gives to programs, and prompts that warm recorded"),
        ("settings", config_path(), "edited by you"),
    )
    return [
        StoredPlace("models", store, size_of(store) - unfinished, "localllm rm NAME"),
        StoredPlace("unfinished", store / "partial", unfinished, "localllm rm --unfinished"),
        StoredPlace("chats", chats, chats_bytes, "deleted in the chat"),
        *(StoredPlace(what, path, size_of(path), bound) for what, path, bound in found),
    ]


def cleared(what: str) -> int:
    """Clear a cache of that name, and return the bytes freed.

    Removes only files with localllm's names, and subfolders that become empty: a folder that an environment variable
    names may contain other files. Raises RequestError for other words, and afterwards if a file could not be removed.
    """
    if what not in _CACHES:
        raise RequestError(
            f"unknown cache {what!r}; choose {', '.join(_CACHES)}. Models are removed with `localllm rm`."
        )
    root_of, subfolders, names = _CACHES[what]
    root = root_of()
    before = size_of(root)
    folders = [root]

    def refuse(error: OSError) -> NoReturn:
        raise RequestError(f"{error.filename} cannot be read: {error.strerror}. Empty it by hand.") from error

    failed: list[OSError] = []

    def remove(how: Callable[[], None]) -> None:
        try:
            how()
        except OSError as error:  # on Windows also while a program has loaded the file
            failed.append(error)

    if subfolders is not None:
        found = (each for each in listed(root, refuse) if subfolders.fullmatch(each.name))
        folders = [each for each in found if os.path.isdir(each) and not each.is_symlink()]
    for folder in folders:
        for file in listed(folder, refuse):
            if names.fullmatch(file.name) and os.path.isfile(file) and not file.is_symlink():
                remove(partial(file.unlink, missing_ok=True))
        if subfolders and not any(folder.iterdir()):
            remove(folder.rmdir)
    if failed:
        advice = "End the programs that use it, or remove it by hand."
        raise RequestError(f"{failed[0].filename} cannot be removed: {failed[0].strerror}. {advice}") from failed[0]
    return before - size_of(root)


def _packed_limit(mib: int | None) -> str:
    if mib is not None:
        return f"at most {mib:,} MiB (packed_mib)" if mib else "off (packed_mib)"
    return f"at most {PACKED_BYTES >> 30} GiB or {PACKED_SHARE:.0%} of the free disk"


def size_of(path: Path) -> int:
    """Disk usage in bytes of a file, or of all files below a folder; holes do not count.

    What cannot be examined, or vanishes meanwhile, does not count either.
    """
    found = [os.path.join(parent, name) for parent, _, names in walked(path) for name in names]
    size = 0
    for each in found if os.path.isdir(path) else [os.fspath(path)]:
        with contextlib.suppress(OSError):
            state = os.lstat(each)
            size += disk_bytes(state) if stat.S_ISREG(state.st_mode) else 0
    return size
