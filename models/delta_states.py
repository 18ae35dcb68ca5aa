"""States of gated delta networks and selective scans: few slots, each with all that the rows of one page need.

A slot (cpu_kernels.page_states) holds the state at the first token of a page and what the page's tokens add. It serves
every row up to the last one written, so a cut or a fork within the page goes on at once, and it begins the next page.
States are large, so pages of long ago are thinned out: a slot without use goes the sooner the longer that is, and the
later the rounder its page's number is. Where no slot is near, the rows since the last one are computed once more.

While a step runs, pages that are not to be kept pass their slot on, and it is changed in place.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered

import numpy as np

from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.memory import aligned_zeros, zeros_from_the_front
from models.config import ModelConfig

LEAST_SLOTS = 4
_MOST_SLOTS = 256
# States may take this part of the memory for keys and values: one in so many.
_SHARE = 4
# Pages at the end of a step that are kept, and how far apart those before them are.
_NEAR, _APART = 8, 16
_ROUNDEST = 6


def slot_bytes(config: ModelConfig) -> int:
    """Bytes of a slot, 0 for a model whose layers have no such states."""
    sizes = config.slot_sizes
    return sum(config.recurs) * sizes.slot_parts * sizes.part_bytes if sizes else 0


def slots_within(config: ModelConfig, budget: int) -> int:
    """Slots that a model has where keys, values and states together may take so many bytes."""
    size = slot_bytes(config)
    return min(max(budget // _SHARE // size, LEAST_SLOTS), _MOST_SLOTS) if size else 0


class DeltaStates:
    """Slots, and which page each belongs to. Not thread-safe.

    slot_of_page: int32[pages], where a step finds the slot of each of its pages; -1 where there is none.
    """

    def __init__(self, config: ModelConfig, slots: int, pages: int, group: int, group_places: int) -> None:
        """group, group_places: pages of a group, and what a group takes in a sequence's table."""
        sizes = config.slot_sizes
        assert sizes is not None
        self.places = (group, group_places, slot_bytes(config), sizes.part_bytes)
        layers = np.flatnonzero(config.recurs).tolist()
        self._numbers = {layer: i for i, layer in enumerate(layers)}
        self._slots = zeros_from_the_front((slots, len(layers), sizes.slot_parts * sizes.part_bytes))
        self.slot_of_page = np.asarray(aligned_zeros((pages,), np.int32), np.int32)
        self.slot_of_page[:] = -1
        self._page, self._rows, self._index = np.full(slots, -1), np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._used = np.zeros(slots, np.int64)
        self._clock = self._reserve = 0
        self._needed: set[int] = set()  # by the run, from one of its steps to the next
        self._passed_on: list[tuple[int, int]] = []  # in the latest step: page and slot
        self._written: list[tuple[int, int]] = []  # by the step that runs: slot and rows of its page

    @property
    def most_segments(self) -> int:
        """Sequences that a step can serve at once: each may need a slot to begin with, a copy, and the next one."""
        return max(1, len(self._page) // 3)

    def address(self, layer: int) -> int:
        """Address of a layer's part of slot 0."""
        return int(self._slots[0, self._numbers[layer]].ctypes.data)

    def begin(self, segments: int) -> None:
        """Begin a run of so many segments: what they find from now on is not taken for others until the next."""
        self._clock += 1
        self._reserve = 2 * segments
        self._needed.clear()

    def begin_step(self) -> None:
        """Begin to prepare a step of the run."""
        self._clock += 1
        self._used[list(self._needed)] = self._clock
        self._passed_on.clear()

    def find(self, page: Callable[[int], int], length: int) -> int:
        """Positions of a sequence, up to its length, that its next rows can follow: a slot knows their state.

        page: the number of the sequence's page of an index.
        """
        for index in range(-(-length // PAGE_TOKENS) - 1, -1, -1):
            slot = self._of(page(index))
            if slot >= 0 and self._rows[slot]:
                self._used[slot] = self._clock
                self._needed.add(slot)
                return min(length, index * PAGE_TOKENS + int(self._rows[slot]))
        return 0

    def prepare(self, page: Callable[[int], int], start: int, stop: int) -> None:
        """Give each page of positions start..stop-1 its slot for the step, which `find` has said can follow.

        page: as `find` has it.
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
        """Note what the step that was prepared for has written."""
        for slot, rows in self._written:
            self._rows[slot] = rows
        for page, _ in self._passed_on:
            self.slot_of_page[page] = -1
        self._written.clear()

    def repeat(self, pages: Ordered[int]) -> None:
        """Let the latest step, which wrote these pages, run again for a measurement; what it wrote is lost."""
        for page in pages:
            if (slot := self._of(page)) >= 0:
                self._rows[slot] = 0
        for page, slot in self._passed_on:
            self.slot_of_page[page] = slot

    def copy(self, source: int, target: int, index: int) -> None:
        """Give a copy of a page a copy of its slot, if it has one."""
        slot = self._of(source)
        if slot < 0 or not self._rows[slot]:
            return
        self._used[slot] = self._clock
        copy = self._take(target, index)
        self._needed.add(copy)
        self._slots[copy] = self._slots[slot]
        self._rows[copy] = self._rows[slot]

    def drop(self, page: int) -> None:
        """Free the slot of a page that nobody holds any longer."""
        if (slot := self._of(page)) >= 0:
            self._page[slot], self._rows[slot], self._used[slot] = -1, 0, 0
        self.slot_of_page[page] = -1

    def read(self, page: int, rows: int) -> bytes:
        """The slot of a page for its first rows, nothing where there is none."""
        slot = self._of(page)
        return self._slots[slot].tobytes() if slot >= 0 and self._rows[slot] >= rows else b""

    def write(self, page: int, index: int, rows: int, data: bytes | memoryview) -> None:
        """Give a page a slot of which `read` said that it knows so many rows."""
        slot = self._of(page)
        if slot < 0:
            self._clock += 1
            slot = self._take(page, index)
        self._slots[slot] = np.frombuffer(data, np.uint8).reshape(self._slots.shape[1:])
        self._rows[slot], self._used[slot] = rows, self._clock

    def _of(self, page: int) -> int:
        """The slot that belongs to a page, -1 where there is none."""
        slot = int(self.slot_of_page[page])
        return slot if slot >= 0 and self._page[slot] == page else -1

    def _own(self, slot: int, page: int, index: int) -> None:
        """Make a page the only one that a slot belongs to, and the slot its only one."""
        if self._of(page) not in (-1, slot):
            self.drop(page)
        self._page[slot], self._index[slot], self._used[slot] = page, index, self._clock
        self.slot_of_page[page] = slot

    def _spare(self) -> int:
        """Slots that this run does not use."""
        return int(np.count_nonzero(self._used < self._clock))

    def _take(self, page: int, index: int) -> int:
        """Give a page a free slot, or the one that is missed least."""
        behind = self._index + 1
        roundness = np.minimum(np.log2(behind & -behind), _ROUNDEST)
        age = np.where(self._page < 0, np.inf, (self._clock - self._used) / 2.0**roundness)
        slot = int(np.argmax(np.where(self._used < self._clock, age, -1.0)))
        assert self._used[slot] < self._clock, "more slots are needed at once than there are"
        if self._page[slot] >= 0:
            self.drop(int(self._page[slot]))
        self._own(slot, page, index)
        return slot
