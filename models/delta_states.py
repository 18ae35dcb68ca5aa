"""States of gated delta networks and selective scans: a few slots, each with all that the rows of one page need.

A slot (cpu_kernels.page_states) holds the state at the first token of a page and what the page's tokens add. It serves
every row up to the last one written, so a sequence truncated or forked within the page continues without recomputation,
and the next page's state follows from it. States are large, so slots are evicted: the longer unused, the sooner, but
later for pages whose index + 1 is divisible by a larger power of two, so that old pages keep a sparse set of slots. If
no slot is near, the rows since the last one are recomputed.

Within a step, a page that does not keep its slot passes it on to the next page, which updates it in place.
"""

from collections.abc import Callable

import numpy as np

from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.memory import aligned_zeros, zeros_from_the_front
from models.config import ModelConfig

# Pages at the end of a step that keep slots, and the interval of earlier pages that do.
_NEAR, _APART = 8, 16
_ROUNDEST = 6


class DeltaStates:
    """Slots, and the page that each belongs to. Not thread-safe.

    slot_of_page: int32[pages], the slot number of each page, which kernels read; -1 for none.
    """

    def __init__(self, config: ModelConfig, slots: int, pages: int, group: int, group_places: int) -> None:
        """group: pages of a group. group_places: place numbers that a group spans in a page table."""
        sizes = config.slot_sizes
        assert sizes is not None
        self.places = (group, group_places, sizes.slot_bytes, sizes.part_bytes)
        layers = np.flatnonzero(sizes.layers).tolist()
        self._numbers = {layer: i for i, layer in enumerate(layers)}
        self.slots = zeros_from_the_front((slots, len(layers), sizes.slot_parts * sizes.part_bytes))
        self.slot_of_page = np.asarray(aligned_zeros((pages,), np.int32), np.int32)
        self.slot_of_page[:] = -1
        self.page_of, self._rows, self._index = np.full(slots, -1), np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._used = np.zeros(slots, np.int64)
        self._clock = self._reserve = 0
        self._needed: set[int] = set()  # by the run, across its steps
        self._passed_on: list[tuple[int, int]] = []  # in the latest step: (page, slot)
        self._written: list[tuple[int, int]] = []  # by the current step: (slot, rows of its page)

    @property
    def most_segments(self) -> int:
        """The most sequences in a step: each may need its present slot, a copy of it, and the next page's."""
        return max(1, len(self.page_of) // 3)

    def address(self, layer: int) -> int:
        """Address of a layer's part of slot 0."""
        return int(self.slots[0, self._numbers[layer]].ctypes.data)

    def begin(self, segments: int) -> None:
        """Begin a run of `segments` segments. Slots that it finds are not evicted until the next run begins."""
        self._clock += 1
        self._reserve = 2 * segments
        self._needed.clear()

    def begin_step(self) -> None:
        """Begin a step of the run, before its segments are prepared."""
        self._clock += 1
        self._used[list(self._needed)] = self._clock
        self._passed_on.clear()

    def find(self, page: Callable[[int], int], length: int) -> int:
        """Return after how many of a sequence's first `length` positions rows can continue: those that a slot covers.

        page: maps a page's index in the sequence to its number. Keeps the slot from eviction during the run.
        """
        for index in range(-(-length // PAGE_TOKENS) - 1, -1, -1):
            slot = self._of(page(index))
            if slot >= 0 and self._rows[slot]:
                self._used[slot] = self._clock
                self._needed.add(slot)
                return min(length, index * PAGE_TOKENS + int(self._rows[slot]))
        return 0

    def prepare(self, page: Callable[[int], int], start: int, stop: int) -> None:
        """Assign slots to the pages of positions start..stop-1 for the step. `find` must have returned `start`.

        page: as for `find`.
        """
        first, last = start // PAGE_TOKENS, (stop - 1) // PAGE_TOKENS
        if start % PAGE_TOKENS == 0 and first:
            self._used[self._of(page(first - 1))] = self._clock
        slot = self._of(page(first))
        if slot < 0:
            slot = self._take(page(first), first)
        self._used[slot] = self._clock
        for index in range(first + 1, last + 1):
            before = index - 1
            kept = before == first or last - before <= _NEAR or index % _APART == 0
            if kept and self._spare() > self._reserve:
                self._written.append((slot, PAGE_TOKENS))
                slot = self._take(page(index), index)
            else:
                self._passed_on.append((page(before), slot))
                self._own(slot, page(index), index)
        self._written.append((slot, stop - last * PAGE_TOKENS))

    def settle(self) -> None:
        """Record what the prepared step has written, after it ran."""
        for slot, rows in self._written:
            self._rows[slot] = rows
        for page, _ in self._passed_on:
            self.slot_of_page[page] = -1
        self._written.clear()

    def repeat(self) -> None:
        """Let the latest step run again for a measurement: it updates states in place once more."""
        for page, slot in self._passed_on:
            self.slot_of_page[page] = slot

    def copy(self, source: int, target: int, index: int) -> None:
        """Give page `target`, a copy of page `source`, a copy of its slot, if it has one."""
        slot = self._of(source)
        if slot < 0 or not self._rows[slot]:
            return
        self._used[slot] = self._clock
        copy = self._take(target, index)
        self._needed.add(copy)
        self.slots[copy] = self.slots[slot]
        self._rows[copy] = self._rows[slot]

    def drop(self, page: int) -> None:
        """Free the slot of a page, if it has one."""
        if (slot := self._of(page)) >= 0:
            self.page_of[slot], self._rows[slot], self._used[slot] = -1, 0, 0
        self.slot_of_page[page] = -1

    def cut(self, page: int, rows: int) -> None:
        """Forget what a page's slot holds of rows from `rows` on, whose tokens are replaced."""
        if (slot := self._of(page)) >= 0:
            self._rows[slot] = min(self._rows[slot], rows)

    def read(self, page: int, rows: int) -> bytes:
        """The bytes of a page's slot if it covers the page's first `rows` rows, else empty."""
        slot = self._of(page)
        return self.slots[slot].tobytes() if slot >= 0 and self._rows[slot] >= rows else b""

    def write(self, page: int, index: int, rows: int, data: bytes | memoryview) -> None:
        """Give a page a slot with the data that `read` returned for `rows` rows."""
        slot = self._of(page)
        if slot < 0:
            self._clock += 1
            slot = self._take(page, index)
        self.slots[slot] = np.frombuffer(data, np.uint8).reshape(self.slots.shape[1:])
        self._rows[slot], self._used[slot] = rows, self._clock

    def _of(self, page: int) -> int:
        """The slot of a page, -1 for none."""
        slot = int(self.slot_of_page[page])
        return slot if slot >= 0 and self.page_of[slot] == page else -1

    def _own(self, slot: int, page: int, index: int) -> None:
        """Assign a slot to a page, and free the page's previous slot."""
        if self._of(page) not in (-1, slot):
            self.drop(page)
        self.page_of[slot], self._index[slot], self._used[slot] = page, index, self._clock
        self.slot_of_page[page] = slot

    def _spare(self) -> int:
        """Number of slots that this run does not use."""
        return int(np.count_nonzero(self._used < self._clock))

    def _take(self, page: int, index: int) -> int:
        """Assign a page a free slot, or evict one as the module describes."""
        behind = self._index + 1
        roundness = np.minimum(np.log2(behind & -behind), _ROUNDEST)
        age = np.where(self.page_of < 0, np.inf, (self._clock - self._used) / 2.0**roundness)
        slot = int(np.argmax(np.where(self._used < self._clock, age, -1.0)))
        assert self._used[slot] < self._clock, "more slots are needed at once than there are"
        if self.page_of[slot] >= 0:
            self.drop(int(self.page_of[slot]))
        self._own(slot, page, index)
        return slot
