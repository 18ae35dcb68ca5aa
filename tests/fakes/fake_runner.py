"""A runner without a model: real page accounting, and logits that change with any wrong reuse of KV."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_io.runner_info import RunnerInfo

EOG = 0
POISON = -1
USUAL = RunnerInfo(
    backend="fake",
    vocab_size=64,
    max_context=4096,
    max_rows=32,
    max_sequences=64,
    page_size=4,
    pages_total=64,
    kv_bytes_per_token=4,
    kv_layout="fake-1",
)


class FakeRunner:
    """Stores token ids where a real runner stores keys and values; logits are a hash of the stored history.

    bias: lets a test change a row of logits, given its history.
    """

    def __init__(
        self,
        *,
        pages: int = 64,
        bias: Callable[[list[int], NDArray[np.float32]], None] | None = None,
        **described: Any,
    ) -> None:
        """described: fields of RunnerInfo that differ from the defaults."""
        self.info = replace(USUAL, pages_total=pages, **described)
        self.rows_computed = 0
        self.batches: list[int] = []
        self.closed = False
        self._bias = bias
        self._pages: dict[int, list[int]] = {}
        self._references: dict[int, int] = {}
        self._free = list(range(pages))
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._adapters: dict[int, tuple[tuple[int, float], ...]] = {}
        self._next = 0

    def pages_free(self) -> int:
        return len(self._free)

    def page_holders(self) -> NDArray[np.int32]:
        return np.array([self._references.get(page, 0) for page in range(self.info.pages_total)], np.int32)

    def pages_needed(self, sequence: int, tokens: int) -> int:
        length, table = self._lengths[sequence], self._tables[sequence]
        new = -(-(length + tokens) // self.info.page_size) - len(table)
        return new + int(tokens > 0 and length % self.info.page_size != 0 and self._references[table[-1]] > 1)

    def create_sequence(self, adapters: tuple[tuple[int, float], ...] = ()) -> int:
        if len(self._tables) >= self.info.max_sequences:
            raise RuntimeError("no sequence handle left")
        self._next += 1
        self._tables[self._next], self._lengths[self._next] = [], 0
        self._adapters[self._next] = adapters
        return self._next

    def fork_sequence(self, source: int, length: int) -> int:
        if not 0 <= length <= self._lengths[source]:
            raise ValueError(f"cannot fork {length} of {self._lengths[source]} tokens")
        if length != self._lengths[source] and not self.info.can_truncate:
            raise ValueError("cannot fork a part")
        fork = self.create_sequence(self._adapters[source])
        self._tables[fork] = self._tables[source][: -(-length // self.info.page_size)]
        self._lengths[fork] = length
        for page in self._tables[fork]:
            self._references[page] += 1
        return fork

    def truncate_sequence(self, sequence: int, length: int) -> None:
        if not self.info.can_truncate:
            raise ValueError("cannot truncate")
        if not 0 <= length <= self._lengths[sequence]:
            raise ValueError("truncation makes no sequence longer")
        keep = -(-length // self.info.page_size)
        self._drop(self._tables[sequence][keep:])
        del self._tables[sequence][keep:]
        self._lengths[sequence] = length

    def free_sequence(self, sequence: int) -> None:
        self._drop(self._tables.pop(sequence))
        del self._lengths[sequence], self._adapters[sequence]

    def sequence_length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        if not 0 < len(tokens) <= self.info.max_rows or not len(tokens) == len(positions) == len(sequences):
            raise ValueError(f"a batch of {len(tokens)} rows")
        if list(wanted) != sorted(set(wanted)):
            raise ValueError("wanted rows must ascend")
        changes = [i for i in range(1, len(sequences)) if sequences[i] != sequences[i - 1]]
        if len(changes) + 1 != len(set(sequences)):
            raise ValueError("the rows of one sequence must be contiguous")
        logits = {}
        for row, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            if position >= self.info.max_context:
                raise ValueError(f"row {row}: position {position} is beyond the context")
            if not 0 <= token < self.info.vocab_size or position != self._lengths[sequence]:
                raise ValueError(f"row {row}: token {token} at {position}, length {self._lengths[sequence]}")
            self._append(sequence, token)
            if row in wanted:
                logits[row] = self.logits_after(self.history(sequence), self._adapters[sequence])
        self.rows_computed += len(tokens)
        self.batches.append(len(tokens))
        return np.array([logits[row] for row in wanted], np.float32).reshape(len(wanted), self.info.vocab_size)

    def logits_after(self, history: list[int], adapters: tuple[tuple[int, float], ...] = ()) -> NDArray[np.float32]:
        """The logits for a history under these adapters, however it was stored."""
        said = np.array(history, np.int32).tobytes() + (repr(adapters).encode() if adapters else b"")
        seed = int.from_bytes(blake2b(said, digest_size=8).digest(), "little")
        row = np.random.default_rng(seed).normal(size=self.info.vocab_size).astype(np.float32)
        row[EOG] = -20
        if self._bias:
            self._bias(history, row)
        return row

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        return np.array(self.history(sequence)[start:stop], np.int32).tobytes()

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        if len(data) != 4 * (stop - start):
            raise ValueError("wrong size")
        if start != self._lengths[sequence]:
            raise ValueError("import does not continue the sequence")
        for (token,) in struct.iter_unpack("<i", data):
            self._append(sequence, token)

    def close(self) -> None:
        self.closed = True

    def history(self, sequence: int) -> list[int]:
        """The tokens stored in the sequence."""
        stored = [token for page in self._tables[sequence] for token in self._pages[page]]
        stored = stored[: self._lengths[sequence]]
        if POISON in stored or len(stored) != self._lengths[sequence]:
            raise RuntimeError("a freed page is read")
        return stored

    def check_integrity(self, sequences: set[int]) -> None:
        """Raise unless exactly these sequences exist and every page's reference count matches their tables."""
        if set(self._tables) != sequences:
            raise RuntimeError(f"sequences alive {set(self._tables)}, expected {sequences}")
        counted: dict[int, int] = {}
        for table in self._tables.values():
            for page in table:
                counted[page] = counted.get(page, 0) + 1
        if counted != self._references or len(counted) + len(self._free) != self.info.pages_total:
            raise RuntimeError("page references do not add up")

    def _append(self, sequence: int, token: int) -> None:
        length, table = self._lengths[sequence], self._tables[sequence]
        offset = length % self.info.page_size
        if offset == 0:
            table.append(self._take())
        elif self._references[table[-1]] > 1:
            copy = self._take()
            self._pages[copy] = list(self._pages[table[-1]])
            self._references[table[-1]] -= 1
            table[-1] = copy
        self._pages[table[-1]][offset:] = [token]
        self._lengths[sequence] = length + 1

    def _take(self) -> int:
        if not self._free:
            raise RuntimeError("pages ran out: the caller did not ask pages_needed")
        page = self._free.pop()
        self._pages[page], self._references[page] = [], 1
        return page

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._pages[page][:] = [POISON] * self.info.page_size
                del self._references[page]
                self._free.append(page)
