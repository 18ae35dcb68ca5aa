"""Storage of keys and values: a pool of reference-counted pages, and each sequence's page table.

A page number stands for 16 tokens in all layers (models.page_arrays). The lowest free page is handed out first, so a
sequence's pages are mostly contiguous. Layers that share keys and values with an earlier one have no pages. Keys and
values of sliding-window layers are in parts of their own, which come and go with the window (models.window_pages).
"""

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.kv_types import PAGE_TOKENS, Plane
from cpu_kernels.memory import zeros_from_the_front
from cpu_kernels.pages import KVPages
from gguf_io.image_rows import ImageSpans
from models.config import ModelConfig
from models.convolution_states import STATE_ROWS, ConvolutionStates
from models.delta_states import DeltaStates
from models.kv_layout import (
    KVTypes,
    WindowLayers,
    heads_bytes,
    heads_stored,
    page_bytes,
    slots_within,
)
from models.late_memory import Move
from models.page_arrays import PageArrays
from models.sizes.convolution import ConvolutionSizes
from models.window_pages import WindowPages

TABLE_STEP = 64
"""Initial capacity of a page table in pages, and the least by which it grows."""
_MOST_PAGES = 1 << 20  # for models without attention, whose pages hold only token ids
# Bookkeeping is in units of at least this part of a page's window layers, where no other layers store anything.
_LEAST_UNIT = 64


@dataclass
class Sequence:
    """A sequence's length in tokens and its page table: table[:ceil(length / 16)], stored at table_address.

    An entry is a page's place, see models.page_arrays. window_table has the places of the window parts of pages `tail`
    to the last, all of which have one; other entries are those of part 0.
    """

    length: int = 0
    # The position up to which its last page holds values, at least length; more if the sequence was truncated, or
    # forked from a longer one.
    written: int = 0
    # The position after the rows that its last page keeps for short convolutions, if the page is not full.
    state: int = 0
    tail: int = 0
    # Whether nothing was appended since it was forked or its window was imported.
    branches: bool = False
    # LoRA adapters by number, each with its weight, that compute the sequence.
    adapters: tuple[tuple[int, float], ...] = ()
    # Images among its tokens, while rows are appended to it.
    images: ImageSpans | None = None
    table: NDArray[np.int32] = field(init=False)
    window_table: NDArray[np.int32] = field(init=False)
    table_address: int = field(init=False)

    def __post_init__(self) -> None:
        self._place(TABLE_STEP)

    def reserve(self, pages: int) -> None:
        """Make room for this many pages."""
        if pages > len(self.table):
            table, of_window = self.table, self.window_table
            self._place(2 * pages + TABLE_STEP)
            self.table[: len(table)] = table
            self.window_table[: len(of_window)] = of_window

    @property
    def pages(self) -> int:
        """Number of pages in use."""
        return -(-self.length // PAGE_TOKENS)

    def _place(self, pages: int) -> None:
        """Allocate empty tables; kernels find the second one by the address before the first (records.page_table)."""
        header = np.dtype(np.int64).itemsize // np.dtype(np.int32).itemsize
        both = np.zeros(header + 2 * pages, np.int32)
        self.table, self.window_table = both[header : header + pages], both[header + pages :]
        both[:header].view(np.int64)[0] = self.window_table.ctypes.data
        self.table_address = self.table.ctypes.data


class PageStore:
    """The pages of all layers within a budget, shared between sequences by reference counts. Not thread-safe.

    What sequences take is counted in units of bytes_per_token * 16 bytes: `total` of them, of which `free` are not in
    use. A unit is a page of all layers, or of those without a window.
    """

    def __init__(
        self, config: ModelConfig, budget_bytes: int, types: KVTypes, windows: WindowLayers | None = None
    ) -> None:
        """budget_bytes: limits the pool, which takes memory from the system only when pages are first written.

        windows: the layers of which only the window is kept; None to keep all tokens of all layers.
        """
        self.types = types
        sizes, budget, slots = config.slot_sizes, budget_bytes, 0
        if sizes:
            slots = slots_within(sizes, budget_bytes)
            budget -= slots * sizes.slot_bytes
        kept, of_window = heads_stored(config, windows)
        self._page_bytes = page_bytes(config, types, kept)
        self._part_bytes = heads_bytes(of_window.values(), types)
        least = -(-self._part_bytes // _LEAST_UNIT // PAGE_TOKENS) * PAGE_TOKENS
        self._page_bytes = max(self._page_bytes, least)
        self.bytes_per_token = self._page_bytes // PAGE_TOKENS
        self.window_bytes_per_token = self._part_bytes // PAGE_TOKENS
        self.total = min(max(1, budget // self._page_bytes), _MOST_PAGES)
        self.arrays = PageArrays(kept, types, self.total)
        # The layer whose keys and values each layer reads: itself, or an earlier one.
        self._sources: list[int] = []
        for layer, source in enumerate(config.attention.kv_layers):
            self._sources.append(layer if source == layer else self._sources[source])
        self.windows: WindowPages | None = None
        if windows:
            count = self.total * self._page_bytes // self._part_bytes + 1
            arrays = PageArrays(of_window, types, count, of_window=True)
            self.windows = WindowPages(arrays, self.total)
            self._of_window = windows
        places = self.arrays.groups, self.arrays.group, self.arrays.group_places
        self.states: ConvolutionStates | None = None
        if isinstance(config.state, ConvolutionSizes):
            self.states = ConvolutionStates(config.state, *places)
            self.arrays.all.append((self.states.pages, ()))
        self.delta = DeltaStates(config, slots, self.total, *places[1:]) if slots else None
        self._ids: NDArray[np.uint8] | None = None
        if self.states or self.delta:
            self._ids = zeros_from_the_front((self.arrays.groups, 1, 1, self.arrays.group, 4 * PAGE_TOKENS))
            self.arrays.all.append((self._ids, [Plane(0, np.int32, (PAGE_TOKENS,), (0,))]))
        self._references = np.zeros(self.total, np.int32)
        self._free_again: list[int] = []
        self._untouched = 0

    def moves_from(self, recorded: "PageStore") -> list[Move]:
        """Moves from a store of another size, whose addresses a program was recorded with, to this one."""
        moves = []
        for old, new in zip(recorded._memory, self._memory, strict=True):
            first = old.ctypes.data
            moves.append((first, first + old.nbytes, new.ctypes.data - first))
        return moves

    @property
    def _memory(self) -> list[NDArray[np.generic]]:
        """The arrays whose addresses operations have."""
        found: list[NDArray[np.generic]] = [pages for pages, _ in self.arrays.all]
        if self.windows:
            found += [pages for pages, _ in self.windows.arrays.all]
        if self.states:
            found.append(self.states.latest)
        if self.delta:
            found += [self.delta.slots, self.delta.slot_of_page]
        return found

    @property
    def free(self) -> int:
        """Number of units that no sequence takes. Kept windows take none, since they go when room is needed."""
        pages = self._pages_free
        if self.windows is None:
            return pages
        return (pages * self._page_bytes - self.windows.held * self._part_bytes) // self._page_bytes

    @property
    def window(self) -> int:
        """Tokens that a row sees of window layers; 0 if all tokens of all layers are kept."""
        return self._of_window.window if self.windows else 0

    @property
    def window_share(self) -> float:
        """What a page of window layers takes, in units."""
        return self._part_bytes / self._page_bytes

    @property
    def window_use(self) -> tuple[int, int]:
        """Units that window layers take: for sequences, and for kept windows."""
        if self.windows is None:
            return 0, 0
        held, kept = self.windows.held, self.windows.used - self.windows.held
        return round(held * self.window_share), round(kept * self.window_share)

    def holders(self) -> NDArray[np.int32]:
        """Reference counts of all pages that were ever allocated."""
        return self._references[: self._untouched].copy()

    def of_layer(self, layer: int) -> KVPages:
        """The pages that a layer reads, which may be an earlier layer's: see PageArrays.of_layer."""
        source = self._sources[layer]
        if self.windows and source in self.windows.arrays:
            return self.windows.arrays.of_layer(source)
        return self.arrays.of_layer(source)

    def needed(self, sequence: Sequence, tokens: int) -> int:
        """Units that appending this many tokens takes: for new pages, and for a copy of a shared last page."""
        if tokens == 0:
            return 0
        new = -(-(sequence.length + tokens) // PAGE_TOKENS) - sequence.pages
        new += self._last_is_shared(sequence)
        if self.windows is None:
            return new
        gone = slice(sequence.tail, max(sequence.tail, self._first_held(sequence.length)))
        freed = self.windows.going(self.arrays.numbers(sequence.table[gone]))
        return max(0, -(-(new * self._page_bytes + (new - freed) * self._part_bytes) // self._page_bytes))

    def append(self, sequence: Sequence, tokens: int, stored: bool = False) -> None:
        """Append this many positions, copying a shared last page. The caller has checked `needed` against `free`.

        stored: `write` fills them, without window layers. Otherwise rows are computed, which see the sequence's window;
        the caller has checked that it is there (`reusable`), and parts before it are freed.
        """
        start, before = sequence.length, sequence.pages
        if self.windows and not stored:
            self._leave(sequence, min(self._first_held(start), before))
        elif self.windows:
            self._leave(sequence, before)
        if self._last_is_shared(sequence):
            self._copy_last(sequence)
        if stored and self.windows and start % PAGE_TOKENS:
            self.windows.discard(self._number(sequence, before - 1))
        end = -(-(start + tokens) // PAGE_TOKENS)
        sequence.reserve(end)
        if sequence.written > start + tokens:
            self._clear(sequence, start + tokens)
        for index in range(before, end):
            sequence.table[index] = self.arrays.place(self._take())
        sequence.length += tokens
        sequence.written = sequence.state = sequence.length
        if self.windows and stored:
            sequence.tail = end
        elif self.windows:
            self._add_parts(sequence, before, end)
            apart = self._of_window.apart
            points = [start] if sequence.branches else []
            for point in (*points, *range((start // apart + 1) * apart, sequence.length + 1, apart)):
                self.keep(sequence, point)
            sequence.branches = False

    def keep(self, sequence: Sequence, length: int) -> None:
        """Keep the window before position `length` while there is room, if it is there, for a later fork."""
        if self.windows and length and np.all(self.windows.has(pages := self._window_before(sequence, length))):
            self.windows.keep(pages)

    def reusable(self, sequence: Sequence, length: int) -> int:
        """The most of the first `length` positions after which rows can be computed: all if their window is there."""
        if self.windows is None:
            return length
        end = -(-length // PAGE_TOKENS)
        if sequence.tail <= self._first_seen(length):
            return length
        there = self.windows.has(self._numbers(sequence, 0, end))
        while length:
            first = self._first_seen(length)
            missing = np.flatnonzero(~there[first : -(-length // PAGE_TOKENS)])
            if not len(missing):
                break
            length = (first + int(missing[-1])) * PAGE_TOKENS
        return length

    def fork(self, source: Sequence, length: int) -> Sequence:
        """Return a sequence of the first `length` tokens that shares the source's pages."""
        end = -(-length // PAGE_TOKENS)
        last = end * PAGE_TOKENS
        written, state = min(last, source.written), min(last, source.state)
        made = Sequence(length, written, state, branches=True, adapters=source.adapters)
        made.reserve(end)
        made.table[:end] = source.table[:end]
        self._references[self._numbers(made, 0, end)] += 1
        self._hold_window(made)
        return made

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget positions from `length` on and release their pages."""
        keep, end = -(-length // PAGE_TOKENS), sequence.pages
        whole = sequence.tail > self._first_seen(length) if self.windows else False
        if self.windows:
            self.windows.let_go(self._numbers(sequence, sequence.tail if whole else max(keep, sequence.tail), end))
        for index in reversed(range(keep, end)):
            self._drop(self._number(sequence, index))
        sequence.length = length
        sequence.written = min(keep * PAGE_TOKENS, sequence.written)
        sequence.state = min(keep * PAGE_TOKENS, sequence.state)
        if whole:
            self._hold_window(sequence)
        sequence.tail = min(sequence.tail, keep)

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
        page = divmod(self._number(sequence, last), self.arrays.group)
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
        group, slot = divmod(self._number(sequence, page), self.arrays.group)
        ids: NDArray[np.int32] = self._ids[group, 0, 0, slot].view(np.int32)
        return ids

    def _clear(self, sequence: Sequence, first: int) -> None:
        """Zero the last page from position `first` on.

        Masked positions are multiplied by zero, so an infinity left there by another sequence would become NaN.
        """
        slots = np.arange(first % PAGE_TOKENS, (sequence.written - 1) % PAGE_TOKENS + 1)
        page = self._number(sequence, sequence.pages - 1)
        self.arrays.clear(page, slots)
        if self.windows:
            self.windows.clear(page, slots)

    def read(self, sequence: Sequence, start: int, stop: int) -> bytes:
        """The pages that hold positions start..stop-1, whole: for each array of pages [page][layer][head][bytes].

        Positions after the last one are zero. Window layers are left out, see `read_state`.
        """
        pages = self._numbers(sequence, start // PAGE_TOKENS, -(-stop // PAGE_TOKENS))
        return self.arrays.read(pages, _slots_after(stop))

    def write(self, sequence: Sequence, start: int, stop: int, data: bytes | memoryview) -> None:
        """Write data from `read` to positions start..stop-1, whose pages exist. Raises ValueError for a wrong size."""
        first = start % PAGE_TOKENS
        slots = np.arange(first, min(PAGE_TOKENS, first + stop - start)) if first else np.zeros(0, np.intp)
        pages = self._numbers(sequence, start // PAGE_TOKENS, -(-stop // PAGE_TOKENS))
        self.arrays.write(pages, data, slots)
        sequence.state = stop // PAGE_TOKENS * PAGE_TOKENS
        if self.delta and first:
            self.delta.cut(self._number(sequence, start // PAGE_TOKENS), first)

    def read_state(self, sequence: Sequence, length: int) -> bytes:
        """The state after the first `length` positions: a slot, or the window before them if it is kept or the last.

        Empty if it is not there.
        """
        last = (length - 1) // PAGE_TOKENS
        if self.windows:
            pages = self._window_before(sequence, length)
            wanted = length == sequence.length or self.windows.keeps(int(pages[-1]))
            return self.windows.read(pages, _slots_after(length)) if wanted and np.all(self.windows.has(pages)) else b""
        return self.delta.read(self._number(sequence, last), length - last * PAGE_TOKENS) if self.delta else b""

    def write_state(self, sequence: Sequence, data: bytes | memoryview) -> None:
        """Restore what `read_state` returned for the sequence's length. Raises ValueError for a wrong size."""
        if self.windows:
            self._write_window(sequence, data)
            return
        if self.delta is None or len(data) != self.delta.places[2]:
            raise ValueError(f"a stored state has {len(data)} bytes, which this model's states have not")
        last = sequence.pages - 1
        self.delta.write(self._number(sequence, last), last, sequence.length - last * PAGE_TOKENS, data)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise RuntimeError unless reference counts and free pages match exactly what these sequences hold."""
        counts, holders = np.zeros(self.total, np.int32), np.zeros(self.total, np.int32)
        for sequence in sequences:
            np.add.at(counts, self._numbers(sequence, 0, sequence.pages), 1)
            np.add.at(holders, self._numbers(sequence, sequence.tail, sequence.pages), 1)
        idle = set(self._free_again) | set(range(self._untouched, self.total))
        if not np.array_equal(counts, self._references) or idle != set(np.flatnonzero(counts == 0).tolist()):
            raise RuntimeError("KV pages: reference counts disagree with the sequences that hold them")
        if self.windows:
            self.windows.check_integrity(holders)

    def _copy_last(self, sequence: Sequence) -> None:
        """Replace the last page, which others share, by a copy."""
        last = sequence.pages - 1
        shared, copy = self._number(sequence, last), self._take()
        sequence.table[last] = self.arrays.place(copy)
        self.arrays.copy(shared, copy)
        self._references[shared] -= 1
        if self.delta:
            self.delta.copy(shared, copy, last)
        if self.windows and sequence.tail <= last:
            self._add_parts(sequence, last, last + 1)
            self.windows.copy(shared, copy)
            self.windows.let_go(np.array([shared], np.intp))

    def _first_seen(self, length: int) -> int:
        """The first page with a token that a row at position `length` sees in window layers."""
        return self._of_window.first_seen(length) // PAGE_TOKENS

    def _window_before(self, sequence: Sequence, length: int) -> NDArray[np.intp]:
        """The pages that are kept or stored for a row at position `length`, at least one; it sees no others."""
        last = (length - 1) // PAGE_TOKENS
        return self._numbers(sequence, min(self._first_seen(length), last), last + 1)

    def _first_held(self, length: int) -> int:
        """The first page that a sequence holds for a row at position `length`: so that some tokens may be cut."""
        return self._first_seen(length - PAGE_TOKENS)

    def _leave(self, sequence: Sequence, first: int) -> None:
        """Let the window parts of pages before `first` go."""
        if self.windows and first > sequence.tail:
            self.windows.let_go(self._numbers(sequence, sequence.tail, first))
            sequence.window_table[sequence.tail : first] = 0
            sequence.tail = first

    def _hold_window(self, sequence: Sequence) -> None:
        """Hold the sequence's window if it is there, and the pages before it that `_first_held` tells if they are."""
        if self.windows is None:
            return
        first, needed = self._first_held(sequence.length), self._first_seen(sequence.length)
        pages = self._numbers(sequence, first, sequence.pages)
        there = self.windows.has(pages)
        skipped = 0
        if not np.all(there):
            skipped = needed - first if np.all(there[needed - first :]) else len(pages)
        sequence.tail = first + skipped
        self.windows.hold(pages[skipped:])
        sequence.window_table[: first + skipped] = 0
        sequence.window_table[sequence.tail : sequence.pages] = self.windows.places(pages[skipped:])

    def _add_parts(self, sequence: Sequence, first: int, end: int) -> None:
        """Give pages first..end-1, the last ones of a sequence, their window parts."""
        assert self.windows is not None
        self._make_room(parts=end - first)
        pages = self._numbers(sequence, first, end)
        self._give(pages)
        self.windows.hold(pages)
        sequence.window_table[first:end] = self.windows.places(pages)

    def _write_window(self, sequence: Sequence, data: bytes | memoryview) -> None:
        """Write the window before the sequence's end; its last page must be its own."""
        assert self.windows is not None
        pages = self._window_before(sequence, sequence.length)
        self.windows.arrays.parts(pages, data)  # raises ValueError
        self._leave(sequence, sequence.pages)
        self._make_room(parts=int(np.count_nonzero(~self.windows.has(pages))))
        self._give(pages)
        self.windows.write(pages, data)
        self.windows.keep(pages)
        self._hold_window(sequence)
        sequence.branches = True

    def _give(self, pages: NDArray[np.intp]) -> None:
        """Give pages their window parts, for which there is room."""
        assert self.windows is not None
        if sum(self.windows.give(page) for page in pages.tolist()):
            self._stay_within_budget()

    def _stay_within_budget(self) -> None:
        """Return memory of free pages and parts to the system if it is now needed for others."""
        if self.windows is None:
            return
        resident = self.arrays.resident_bytes + self.windows.arrays.resident_bytes
        if resident > self.total * self._page_bytes:
            self.arrays.give_back(self._free_again)
            self.windows.give_back()

    def _make_room(self, *, pages: int = 0, parts: int = 0) -> None:
        """Give up kept windows until there is room for more pages and window parts."""
        if self.windows is None:
            return
        wanted = pages * self._page_bytes + parts * self._part_bytes
        while self._pages_free * self._page_bytes - self.windows.used * self._part_bytes < wanted:
            if not self.windows.evict():
                raise ValueError("no room for the keys and values of window layers")

    @property
    def _pages_free(self) -> int:
        """Number of pages that no sequence holds."""
        return self.total - self._untouched + len(self._free_again)

    def _last_is_shared(self, sequence: Sequence) -> bool:
        if sequence.length % PAGE_TOKENS == 0:
            return False
        return bool(self._references.item(self._number(sequence, sequence.pages - 1)) > 1)

    def _number(self, sequence: Sequence, index: int) -> int:
        """The page number at an index of a sequence's table; without NumPy, since every step calls it."""
        return self.arrays.number(sequence.table.item(index))

    def _numbers(self, sequence: Sequence, first: int, end: int) -> NDArray[np.intp]:
        """The page numbers at indices first..end-1 of a sequence's table."""
        return self.arrays.numbers(sequence.table[first:end])

    def _take(self) -> int:
        self._make_room(pages=1)
        if self._free_again:
            page = heapq.heappop(self._free_again)
            self.arrays.zero(page)  # masked positions are multiplied by zero, so their values must be finite
        else:
            page = self._untouched
            self._untouched += 1
        self._references[page] = 1
        if self.arrays.touch(page):
            self._stay_within_budget()
        return page

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            if self.delta:
                self.delta.drop(page)
            if self.windows:
                self.windows.forget(page)
            heapq.heappush(self._free_again, page)


def _slots_after(stop: int) -> NDArray[np.intp]:
    """The slots of the page that holds position stop - 1 which come after it."""
    return np.arange(stop % PAGE_TOKENS, PAGE_TOKENS) if stop % PAGE_TOKENS else np.zeros(0, np.intp)


def _pages_of(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The page indices of positions start..stop-1, each with the first and the end position within it."""
    for page in range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
        yield page, max(start, page * PAGE_TOKENS), min(stop, (page + 1) * PAGE_TOKENS)
