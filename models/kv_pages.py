"""Storage of keys and values: a pool of pages, counted references, and each sequence's table of pages.

Each kv head of each layer has its own run of pages: keys lie in a page as [value][token], values as [token][value], so
that a vector of the kernels is 16 tokens of a key's value, or 16 values of a token. All runs use the same page numbers.
Pages are handed out lowest first, so that a sequence's pages mostly follow each other and attention reads one stream.
"""

import heapq
import struct
import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.memory import aligned_zeros
from cpu_kernels.rope import PAGE_TOKENS

_TABLE_STEP = 64


@dataclass
class Sequence:
    """A sequence's length in tokens and its pages: table[:ceil(length / 16)]."""

    length: int = 0
    table: NDArray[np.generic] = field(default_factory=lambda: aligned_zeros((_TABLE_STEP,), np.int32))

    @property
    def pages(self) -> int:
        """Pages in use."""
        return -(-self.length // PAGE_TOKENS)


class PageStore:
    """Pages of all layers within a budget, shared between sequences by reference counts. Not thread-safe."""

    def __init__(self, layers: int, kv_heads: int, padded_head: int, budget_bytes: int) -> None:
        """budget_bytes bounds the pool; memory is taken from the system only as pages are first written."""
        self.bytes_per_token = layers * 2 * kv_heads * padded_head * 2
        self.total = max(1, budget_bytes // (self.bytes_per_token * PAGE_TOKENS))
        # [layer][key or value][head][page][...]
        self._data = aligned_zeros((layers, 2, kv_heads, self.total, padded_head * PAGE_TOKENS), np.float16)
        self._references = np.zeros(self.total, np.int32)
        self._free_again: list[int] = []
        self._untouched = 0
        self._shape = (kv_heads, padded_head)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self.total - self._untouched + len(self._free_again)

    @property
    def head_bytes(self) -> int:
        """Bytes from one head's pages to the next's."""
        return int(self._data.strides[2])

    def address(self, layer: int, value: bool) -> int:
        """Address of page 0 of a layer's keys or values."""
        return int(self._data[layer, int(value)].ctypes.data)

    def needed(self, sequence: Sequence, tokens: int) -> int:
        """Pages that appending tokens takes: new ones, and a copy of a shared last page."""
        if tokens == 0:
            return 0
        new = -(-(sequence.length + tokens) // PAGE_TOKENS) - sequence.pages
        return new + self._last_is_shared(sequence)

    def append(self, sequence: Sequence, tokens: int) -> None:
        """Make room for tokens more, copying a shared last page. The caller has checked `needed` against `free`."""
        if self._last_is_shared(sequence):
            last = sequence.pages - 1
            shared = int(sequence.table[last])
            sequence.table[last] = copy = self._take()
            self._data[:, :, :, copy] = self._data[:, :, :, shared]
            self._references[shared] -= 1
        end = -(-(sequence.length + tokens) // PAGE_TOKENS)
        if end > len(sequence.table):
            longer = aligned_zeros((2 * end + _TABLE_STEP,), np.int32)
            longer[: len(sequence.table)] = sequence.table
            sequence.table = longer
        for index in range(sequence.pages, end):
            sequence.table[index] = self._take()
        sequence.length += tokens

    def fork(self, source: Sequence, length: int) -> Sequence:
        """A sequence of the first `length` tokens that shares the source's pages."""
        pages = -(-length // PAGE_TOKENS)
        table = aligned_zeros((pages + _TABLE_STEP,), np.int32)
        table[:pages] = source.table[:pages]
        self._references[table[:pages]] += 1
        return Sequence(length, table)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget positions from `length` on and give their pages back."""
        keep = -(-length // PAGE_TOKENS)
        for index in range(keep, sequence.pages):
            self._drop(int(sequence.table[index]))
        sequence.length = length

    def read(self, sequence: Sequence, start: int, stop: int) -> bytes:
        """Keys and values of positions start..stop-1 as bytes: [layer][K, V][head][token][value], checksum first."""
        heads, size = self._shape
        first, last = start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)
        pages = np.asarray(sequence.table[first:last])
        shape = (len(self._data), heads, len(pages))
        keys = self._data[:, 0][:, :, pages].reshape(*shape, size, PAGE_TOKENS).swapaxes(-1, -2)
        values = self._data[:, 1][:, :, pages].reshape(*shape, PAGE_TOKENS, size)
        cut = slice(start - first * PAGE_TOKENS, stop - first * PAGE_TOKENS)
        both = [part.reshape(len(self._data), heads, -1, size)[:, :, cut] for part in (keys, values)]
        payload = np.stack(both, axis=1).tobytes()
        return struct.pack("<I", zlib.crc32(payload)) + payload

    def write(self, sequence: Sequence, start: int, stop: int, data: bytes) -> None:
        """Store what `read` gave at positions start..stop-1, whose pages exist. Raises ValueError if it is damaged."""
        heads, size = self._shape
        payload = memoryview(data)[4:]
        expected = (stop - start) * self.bytes_per_token
        if len(payload) != expected or struct.unpack_from("<I", data)[0] != zlib.crc32(payload):
            raise ValueError(f"stored KV of {stop - start} tokens is damaged or has the wrong size")
        both = np.frombuffer(payload, np.float16).reshape(len(self._data), 2, heads, stop - start, size)
        for page in range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            low, high = max(start, page * PAGE_TOKENS), min(stop, (page + 1) * PAGE_TOKENS)
            number = int(sequence.table[page])
            slots = slice(low - page * PAGE_TOKENS, high - page * PAGE_TOKENS)
            piece = both[:, :, :, low - start : high - start]
            keys = self._data[:, 0, :, number].reshape(-1, heads, size, PAGE_TOKENS)
            keys[..., slots] = piece[:, 0].swapaxes(-1, -2)
            values = self._data[:, 1, :, number].reshape(-1, heads, PAGE_TOKENS, size)
            values[:, :, slots] = piece[:, 1]

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise RuntimeError unless reference counts and free pages are exactly what these sequences account for."""
        counts = np.zeros(self.total, np.int32)
        for sequence in sequences:
            np.add.at(counts, np.asarray(sequence.table[: sequence.pages]), 1)
        idle = set(self._free_again) | set(range(self._untouched, self.total))
        if not np.array_equal(counts, self._references) or idle != set(np.flatnonzero(counts == 0).tolist()):
            raise RuntimeError("KV pages: reference counts disagree with the sequences that hold them")

    def _last_is_shared(self, sequence: Sequence) -> bool:
        if sequence.length % PAGE_TOKENS == 0:
            return False
        return bool(self._references[sequence.table[sequence.pages - 1]] > 1)

    def _take(self) -> int:
        if self._free_again:
            page = heapq.heappop(self._free_again)
            # Masked tokens still multiply what lies in their place by zero, so it must be finite.
            self._data[:, :, :, page] = 0
        else:
            page = self._untouched
            self._untouched += 1
        self._references[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            heapq.heappush(self._free_again, page)
