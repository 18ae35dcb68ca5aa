"""Storage of keys and values: a pool of reference-counted pages, and each sequence's page table.

A page number stands for 16 tokens in all layers; cpu_kernels.kv_types defines the layout of a head's page. Within a
group of pages each KV head of each layer has a contiguous run, so that attention reads long streams. Groups are
contiguous too, so that a growing pool takes memory from the front, in huge pages. The lowest free page is handed out
first, so a sequence's pages are mostly contiguous. Layers that share keys and values with an earlier one have no pages.
If layers differ in head size or number of heads, each kind has its own arrays, and a group is one page.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.kv_types import PAGE_TOKENS, Plane
from cpu_kernels.memory import zeros_from_the_front
from models.config import ModelConfig
from models.convolution_states import STATE_ROWS, ConvolutionStates
from models.delta_states import DeltaStates
from models.kv_layout import (
    KVTypes,
    convolution_sizes,
    kind_of,
    kv_bytes_per_token,
    page_bytes,
    page_layouts,
    places_of_layers,
    slots_within,
    state_bytes,
)

_GROUP = 8
"""Pages of a group. More pages make longer streams, but a first token takes a whole group of memory."""
TABLE_STEP = 64
"""Initial capacity of a page table in pages, and the least by which it grows."""
_MOST_PAGES = 1 << 20  # for models without attention, whose pages hold only token ids


@dataclass
class Sequence:
    """A sequence's length in tokens and its page table: table[:ceil(length / 16)], stored at table_address.

    An entry is a page's place: its distance from the first page of a layer's head, in pages of one head, or of all
    layers of a kind if there are several kinds (LayerPages.place_bytes). written: the position up to which its last
    page holds values, at least length; more if the sequence was truncated, or forked from a longer one. state: the
    position after the rows that its last page keeps for short convolutions, if the page is not full.
    """

    length: int = 0
    table: NDArray[np.int32] = field(default_factory=lambda: np.zeros(TABLE_STEP, np.int32))
    written: int = 0
    state: int = 0
    table_address: int = field(init=False)

    def __post_init__(self) -> None:
        self.table_address = self.table.ctypes.data

    @property
    def pages(self) -> int:
        """Number of pages in use."""
        return -(-self.length // PAGE_TOKENS)


class LayerPages(NamedTuple):
    """Where kernels find a layer's keys and its values, which are the same pages for latents.

    addresses: of page 0. head_bytes: from one head's pages to the next. place_bytes: between consecutive place numbers
    of a page table.
    """

    addresses: tuple[int, int]
    head_bytes: tuple[int, int]
    place_bytes: tuple[int, int]


class PageStore:
    """The pages of all layers within a budget, shared between sequences by reference counts. Not thread-safe."""

    def __init__(self, config: ModelConfig, budget_bytes: int, types: KVTypes) -> None:
        """budget_bytes: limits the pool, which takes memory from the system only when pages are first written."""
        self.types = types
        self.bytes_per_token = kv_bytes_per_token(config, types)
        slots = slots_within(config, budget_bytes)
        pages = (budget_bytes - state_bytes(config, budget_bytes)) // page_bytes(config, types)
        self.total = min(max(1, pages), _MOST_PAGES)
        stored = config.kv_heads_of_layers
        counts = Counter(map(kind_of, stored))
        layouts = {kind_of(heads): page_layouts(heads, types) for heads in stored}
        self._group = _GROUP if len(counts) == 1 else 1
        self._group_places = len(stored) * stored[0].keys * _GROUP if len(counts) == 1 else 1
        groups = -(-self.total // self._group)
        # Keys and values of each kind of layer (one array for latents, which are both): [group][layer][head][page][...]
        self._kinds = {
            kind: tuple(
                zeros_from_the_front((groups, counts[kind], kind[0], self._group, layout.page_bytes))
                for layout in layouts[kind]
            )
            for kind in counts
        }
        self._places = places_of_layers(config)
        # All arrays of pages, each with the planes of a page; the rows kept for convolutions have none.
        self._pages: list[tuple[NDArray[np.uint8], Ordered[Plane]]] = [
            (pages, layout.planes)
            for kind, both in self._kinds.items()
            for pages, layout in zip(both, layouts[kind], strict=True)
        ]
        self.states: ConvolutionStates | None = None
        if sizes := convolution_sizes(config):
            self.states = ConvolutionStates(config, sizes, groups, self._group, self._group_places)
            self._pages.append((self.states.pages, ()))
        self.delta = DeltaStates(config, slots, self.total, self._group, self._group_places) if slots else None
        self._ids: NDArray[np.uint8] | None = None
        if self.states or self.delta:
            self._ids = zeros_from_the_front((groups, 1, 1, self._group, 4 * PAGE_TOKENS))
            self._pages.append((self._ids, [Plane(0, np.int32, (PAGE_TOKENS,), (0,))]))
        self._references = np.zeros(self.total, np.int32)
        self._free_again: list[int] = []
        self._untouched = 0

    @property
    def free(self) -> int:
        """Number of pages that no sequence holds."""
        return self.total - self._untouched + len(self._free_again)

    def holders(self) -> NDArray[np.int32]:
        """Reference counts of all pages that were ever allocated."""
        return self._references[: self._untouched].copy()

    def of_layer(self, layer: int) -> LayerPages:
        """The pages that a layer reads, which may be an earlier layer's."""
        kind, number = self._places[layer]
        arrays = self._kinds[kind]
        keys, values = arrays[0], arrays[-1]
        return LayerPages(
            (keys[0, number].ctypes.data, values[0, number].ctypes.data),
            (keys.strides[2], values.strides[2]),
            (keys.strides[0] // self._group_places, values.strides[0] // self._group_places),
        )

    def needed(self, sequence: Sequence, tokens: int) -> int:
        """Pages that appending this many tokens allocates: new ones, and a copy of a shared last page."""
        if tokens == 0:
            return 0
        new = -(-(sequence.length + tokens) // PAGE_TOKENS) - sequence.pages
        return new + self._last_is_shared(sequence)

    def append(self, sequence: Sequence, tokens: int) -> None:
        """Append this many positions, copying a shared last page. The caller has checked `needed` against `free`."""
        if self._last_is_shared(sequence):
            last = sequence.pages - 1
            shared, copy = self._number(sequence, last), self._take()
            sequence.table[last] = self._place(copy)
            for pages, _ in self._pages:
                self._page(pages, copy)[...] = self._page(pages, shared)
            self._references[shared] -= 1
            if self.delta:
                self.delta.copy(shared, copy, last)
        end = -(-(sequence.length + tokens) // PAGE_TOKENS)
        if end > len(sequence.table):
            longer = np.zeros(2 * end + TABLE_STEP, np.int32)
            longer[: len(sequence.table)] = sequence.table
            sequence.table, sequence.table_address = longer, longer.ctypes.data
        if sequence.written > sequence.length + tokens:
            self._clear(sequence, sequence.length + tokens)
        for index in range(sequence.pages, end):
            sequence.table[index] = self._place(self._take())
        sequence.length += tokens
        sequence.written = sequence.state = sequence.length

    def fork(self, source: Sequence, length: int) -> Sequence:
        """Return a sequence of the first `length` tokens that shares the source's pages."""
        pages = -(-length // PAGE_TOKENS)
        table = np.zeros(pages + TABLE_STEP, np.int32)
        table[:pages] = source.table[:pages]
        self._references[self._numbers(table[:pages])] += 1
        end = pages * PAGE_TOKENS
        return Sequence(length, table, min(end, source.written), min(end, source.state))

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget positions from `length` on and release their pages."""
        keep = -(-length // PAGE_TOKENS)
        for index in range(keep, sequence.pages):
            self._drop(self._number(sequence, index))
        sequence.length = length
        sequence.written = min(keep * PAGE_TOKENS, sequence.written)
        sequence.state = min(keep * PAGE_TOKENS, sequence.state)

    def computed(self, sequence: Sequence) -> int:
        """The number of positions after which new rows can continue: all, or those that the latest state covers."""
        length = sequence.length
        if self.delta:
            return self.computed_of(sequence, length)
        if self.states is None or sequence.state == length:
            return length
        return length // PAGE_TOKENS * PAGE_TOKENS

    def computed_of(self, sequence: Sequence, length: int) -> int:
        """Like `computed` for the first `length` positions, in models whose states are kept in slots."""
        assert self.delta is not None
        return self.delta.find(partial(self._number, sequence), length)

    def take_back(self, sequence: Sequence, row: int) -> None:
        """Restore the convolution state after row `row` of the latest step, if kept, for a sequence truncated there."""
        last = sequence.pages - 1
        if self.states is None or row >= STATE_ROWS or not sequence.length % PAGE_TOKENS:
            return
        if self._last_is_shared(sequence):
            return
        page = divmod(self._number(sequence, last), self._group)
        self.states.take_back(row, sequence.length - 1, *page)
        sequence.state = sequence.length

    def prepare(self, segments: Ordered[tuple[Sequence, int, int]]) -> None:
        """Assign state slots for a step.

        segments: (sequence, first position, rows) each.
        """
        assert self.delta is not None
        self.delta.begin_step()
        for sequence, start, count in segments:
            self.delta.prepare(partial(self._number, sequence), start, start + count)

    def note_tokens(self, sequence: Sequence, start: int, tokens: Ordered[int]) -> None:
        """Store the token ids of positions from `start` on, whose pages exist, if rows may have to be recomputed."""
        if self._ids is None:
            return
        for page, first, last in _pages_of(start, start + len(tokens)):
            ids = self._ids_of(sequence, page)
            base = page * PAGE_TOKENS
            ids[first - base : last - base] = tokens[first - start : last - start]

    def tokens(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        """The ids of positions start..stop-1."""
        pages = range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS))
        ids = [token for page in pages for token in self._ids_of(sequence, page).tolist()]
        return ids[start % PAGE_TOKENS : start % PAGE_TOKENS + stop - start]

    def _ids_of(self, sequence: Sequence, page: int) -> NDArray[np.int32]:
        """A writable view of the token ids of a sequence's page: int32[16]."""
        assert self._ids is not None
        group, slot = divmod(self._number(sequence, page), self._group)
        ids: NDArray[np.int32] = self._ids[group, 0, 0, slot].view(np.int32)
        return ids

    def _clear(self, sequence: Sequence, first: int) -> None:
        """Zero the last page from position `first` on.

        Masked positions are multiplied by zero, so an infinity left there by another sequence would become NaN.
        """
        slots = np.arange(first % PAGE_TOKENS, (sequence.written - 1) % PAGE_TOKENS + 1)
        page = self._number(sequence, sequence.pages - 1)
        for pages, planes in self._pages:
            _clear(self._page(pages, page), planes, slots)

    def _pages_at(self, sequence: Sequence, start: int, stop: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The groups of the pages that hold positions start..stop-1, and their places in these."""
        places = sequence.table[start // PAGE_TOKENS : -(-stop // PAGE_TOKENS)]
        return np.divmod(self._numbers(places), self._group)

    def read(self, sequence: Sequence, start: int, stop: int) -> bytes:
        """The pages that hold positions start..stop-1, whole: for each array of pages [page][layer][head][bytes].

        Positions after the last one are zero.
        """
        group, slot = self._pages_at(sequence, start, stop)
        copies = [(pages[group, :, :, slot], planes) for pages, planes in self._pages]
        if stop % PAGE_TOKENS:
            slots = np.arange(stop % PAGE_TOKENS, PAGE_TOKENS)
            for pages, planes in copies:
                _clear(pages[-1], planes, slots)
        return b"".join(pages.data for pages, _ in copies)

    def write(self, sequence: Sequence, start: int, stop: int, data: bytes | memoryview) -> None:
        """Write data from `read` to positions start..stop-1, whose pages exist. Raises ValueError for a wrong size."""
        group, slot = self._pages_at(sequence, start, stop)
        sizes = [pages[0, :, :, 0].nbytes * len(group) for pages, _ in self._pages]
        stored = np.frombuffer(data, np.uint8)
        if len(stored) != sum(sizes):
            raise ValueError(f"stored KV of {stop - start} tokens has {len(stored)} bytes instead of {sum(sizes)}")
        first = start % PAGE_TOKENS
        slots = np.arange(first, min(PAGE_TOKENS, first + stop - start))
        parts = np.split(stored, np.cumsum(sizes)[:-1])
        for (pages, planes), part in zip(self._pages, parts, strict=True):
            copies = part.reshape(len(group), *pages.shape[1:3], -1)
            begin = 0
            if first and planes:  # the first page also holds other tokens
                begin = 1
                for plane in planes:
                    tokens = plane.tokens(np.moveaxis(copies[:1], 0, 2))[:, :, slots]
                    plane.put(self._page(pages, self._number(sequence, start // PAGE_TOKENS)), slots, tokens)
            pages[group[begin:], :, :, slot[begin:]] = copies[begin:]
        sequence.state = stop // PAGE_TOKENS * PAGE_TOKENS
        if self.delta and first:
            self.delta.cut(self._number(sequence, start // PAGE_TOKENS), first)

    def read_state(self, sequence: Sequence, length: int) -> bytes:
        """The bytes of the slot with the state after the first `length` positions, empty if there is none."""
        last = (length - 1) // PAGE_TOKENS
        return self.delta.read(self._number(sequence, last), length - last * PAGE_TOKENS) if self.delta else b""

    def write_state(self, sequence: Sequence, data: bytes | memoryview) -> None:
        """Restore what `read_state` returned for the sequence's length. Raises ValueError for a wrong size."""
        if self.delta is None or len(data) != self.delta.places[2]:
            raise ValueError(f"a stored state has {len(data)} bytes, which this model's states have not")
        last = sequence.pages - 1
        self.delta.write(self._number(sequence, last), last, sequence.length - last * PAGE_TOKENS, data)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise RuntimeError unless reference counts and free pages match exactly what these sequences hold."""
        counts = np.zeros(self.total, np.int32)
        for sequence in sequences:
            np.add.at(counts, self._numbers(sequence.table[: sequence.pages]), 1)
        idle = set(self._free_again) | set(range(self._untouched, self.total))
        if not np.array_equal(counts, self._references) or idle != set(np.flatnonzero(counts == 0).tolist()):
            raise RuntimeError("KV pages: reference counts disagree with the sequences that hold them")

    def _last_is_shared(self, sequence: Sequence) -> bool:
        if sequence.length % PAGE_TOKENS == 0:
            return False
        return bool(self._references.item(self._number(sequence, sequence.pages - 1)) > 1)

    def _place(self, number: int) -> int:
        """A page's place: see Sequence."""
        return number // self._group * self._group_places + number % self._group

    def _number(self, sequence: Sequence, index: int) -> int:
        """The page number at an index of a sequence's table; without NumPy, since every step calls it."""
        group, slot = divmod(sequence.table.item(index), self._group_places)
        return int(group * self._group + slot)

    def _numbers(self, places: NDArray[np.generic]) -> NDArray[np.intp]:
        """The page numbers of these places."""
        group, slot = np.divmod(np.asarray(places, np.intp), self._group_places)
        return group * self._group + slot

    def _page(self, pages: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
        """A page of all layers and heads of a kind: a view [layer][head][...]."""
        return pages[number // self._group, :, :, number % self._group]

    def _take(self) -> int:
        if self._free_again:
            page = heapq.heappop(self._free_again)
            # Masked positions are multiplied by zero, so their values must be finite.
            for pages, _ in self._pages:
                self._page(pages, page)[...] = 0
        else:
            page = self._untouched
            self._untouched += 1
        self._references[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            if self.delta:
                self.delta.drop(page)
            heapq.heappush(self._free_again, page)


def _clear(page: NDArray[np.uint8], planes: Ordered[Plane], slots: NDArray[np.intp]) -> None:
    """Zero the elements of tokens in these slots of a page [layer][head][bytes]."""
    for plane in planes:
        plane.put(page, slots, np.zeros((1, 1, 1, *plane.token_shape), plane.dtype))


def _pages_of(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The page indices of positions start..stop-1, each with the first and the end position within it."""
    for page in range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
        yield page, max(start, page * PAGE_TOKENS), min(stop, (page + 1) * PAGE_TOKENS)
