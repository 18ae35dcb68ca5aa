"""Window parts of pages: keys and values of sliding-window layers, kept only where a later token may see them.

A page of models.kv_pages holds 16 tokens of all other layers for as long as a sequence has them. Its window part is
separate, and goes with the last sequence whose window it is in. Sequences that share a page share its part, so the
window at a branch is stored once. Windows at chosen positions are kept beyond that while there is room, so that a
sequence cut there goes on without computing anything again: the least recently used ones go first.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from models.page_arrays import PageArrays


class WindowPages:
    """The parts, numbered from 1 (part 0 is always zero), of the pages of a store. Not thread-safe.

    held: parts that are in the window of a sequence. used: these, and parts of kept windows.
    """

    def __init__(self, arrays: PageArrays, pages: int) -> None:
        """pages: of the store."""
        self.arrays = arrays
        self.held = self.used = 0
        self._part = np.zeros(pages, np.int32)  # by page; 0: it has none
        self._holders = np.zeros(pages, np.int32)  # sequences whose window a page is in
        self._windows = np.zeros(pages, np.int32)  # kept windows that a page is in
        self._kept: dict[int, NDArray[np.intp]] = {}  # by last page, least recently used first
        self._free_again: list[int] = []
        self._untouched = 1

    def has(self, pages: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of these pages have a part."""
        return self._part[pages] > 0

    def places(self, pages: NDArray[np.intp]) -> NDArray[np.integer]:
        """The places of these pages' parts."""
        return self.arrays.places(self._part[pages])

    def give(self, page: int) -> bool:
        """Give a page a part of zeros, if it has none; return whether that takes memory from the system."""
        if self._part[page]:
            return False
        if self._free_again:
            part = heapq.heappop(self._free_again)
            self.arrays.zero(part)  # masked positions are multiplied by zero, so their values must be finite
        else:
            part = self._untouched
            self._untouched += 1
        self._part[page] = part
        self.used += 1
        return self.arrays.touch(part)

    def give_back(self) -> None:
        """Return memory of free parts to the system."""
        self.arrays.give_back(self._free_again)

    def copy(self, source: int, target: int) -> None:
        """Copy a page's part to another's; both have one."""
        self.arrays.copy(int(self._part[source]), int(self._part[target]))

    def hold(self, pages: NDArray[np.intp]) -> None:
        """Note that pages, which have parts, are in one more sequence's window."""
        self._holders[pages] += 1
        self.held += int(np.count_nonzero(self._holders[pages] == 1))

    def let_go(self, pages: NDArray[np.intp]) -> None:
        """Note that pages are no longer in a sequence's window, and free parts that nothing needs."""
        self._holders[pages] -= 1
        gone = pages[self._holders[pages] == 0]
        self.held -= len(gone)
        self._free(gone)

    def going(self, pages: NDArray[np.intp]) -> int:
        """How many of these pages are in the window of one sequence only."""
        return int(np.count_nonzero(self._holders[pages] == 1))

    def keep(self, pages: NDArray[np.intp]) -> None:
        """Keep the window in these pages of a sequence, which end where the sequence may be cut.

        Of windows that end in the same page, the one that begins first holds all others.
        """
        last = int(pages[-1])
        before = self._kept.pop(last, None)
        if before is not None and len(before) > len(pages):
            pages = before
        self._windows[pages] += 1
        self._kept[last] = pages
        if before is not None:
            self._drop(before)

    def keeps(self, page: int) -> bool:
        """Whether a kept window ends in this page."""
        return page in self._kept

    def evict(self) -> bool:
        """Give up the kept window that is unused for longest; False if there is none."""
        if not self._kept:
            return False
        self._drop(self._kept.pop(next(iter(self._kept))))
        return True

    def forget(self, page: int) -> None:
        """Free the part of a page that no sequence has, and the kept window that ends there."""
        if (window := self._kept.pop(page, None)) is not None:
            self._drop(window)
        self.discard(page)

    def discard(self, page: int) -> None:
        """Free the part of a page whose contents become wrong."""
        if self._part[page]:
            self._free_part(page)

    def read(self, pages: NDArray[np.intp], last: NDArray[np.intp]) -> bytes:
        """The parts of these pages, as PageArrays.read returns pages."""
        return self.arrays.read(np.asarray(self._part[pages], np.intp), last)

    def write(self, pages: NDArray[np.intp], data: bytes | memoryview) -> None:
        """Write what `read` returned to the parts of these pages. Raises ValueError for a wrong size."""
        self.arrays.write(np.asarray(self._part[pages], np.intp), data, np.zeros(0, np.intp))

    def clear(self, page: int, slots: NDArray[np.intp]) -> None:
        """Zero the tokens in these slots of a page's part, if it has one."""
        if self._part[page]:
            self.arrays.clear(int(self._part[page]), slots)

    def check_integrity(self, holders: NDArray[np.int32]) -> None:
        """Raise RuntimeError unless counts and parts match. holders: by page, sequences whose window it is in."""
        windows = np.zeros_like(self._windows)
        for window in self._kept.values():
            windows[window] += 1
        parts = self._part[self._part > 0]
        problems = {
            "holders": not np.array_equal(holders, self._holders),
            "kept windows": not np.array_equal(windows, self._windows),
            "parts held": self.held != np.count_nonzero(holders),
            "parts used": self.used != len(parts) or len(np.unique(parts)) != len(parts),
            "free parts": {*parts.tolist(), *self._free_again} != set(range(1, self._untouched)),
            "parts without use": bool(np.any((self._part > 0) & (holders == 0) & (windows == 0))),
            "windows without parts": bool(np.any((self._part == 0) & (holders > 0))),
        }
        for problem, found in problems.items():
            if found:
                raise RuntimeError(f"KV pages of window layers: {problem} disagree with the sequences")

    def _drop(self, window: NDArray[np.intp]) -> None:
        self._windows[window] -= 1
        self._free(window)

    def _free(self, pages: NDArray[np.intp]) -> None:
        """Free the parts of those pages that are in no window."""
        unused = (self._part[pages] > 0) & (self._holders[pages] == 0) & (self._windows[pages] == 0)
        for page in pages[unused].tolist():
            self._free_part(page)

    def _free_part(self, page: int) -> None:
        heapq.heappush(self._free_again, int(self._part[page]))
        self._part[page] = 0
        self.used -= 1
