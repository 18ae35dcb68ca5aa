"""llama.cpp's saved states of ranges: it saves whole sequences, so a range is laid on one that nobody else uses."""

import ctypes
import mmap
import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_offload.errors import LlamaCppError
from gpu_offload.library import complaints, llama, route_log
from gpu_offload.sequences import Sequences

State = NDArray[np.uint8]
_LENGTH = struct.Struct("<Q")


def packed(states: Iterable[State]) -> bytes:
    """States that follow each other as bytes: each after its length."""
    return b"".join(part for state in states for part in (_LENGTH.pack(len(state)), state.data))


class StateDesk:
    """The sequence number of a context beyond those of its users, on which ranges are laid for export and import.

    window: positions that layers with a sliding window look back, 0 where there are none. can_truncate: False for
    states that are saved whole; a recurrent one knows only its last position, so that its first is not checked.
    """

    def __init__(self, context: Any, sequences: Sequences, window: int, can_truncate: bool) -> None:
        self._lib = llama()
        self._context = context
        self._sequences = sequences
        self._number = sequences.desk
        self._window = window if can_truncate else 0
        self._can_truncate = can_truncate

    def cut(self, start: int, stop: int, step: int | None = None) -> list[tuple[int, int]]:
        """Cut rows start..stop-1 at multiples of `step`, so short that llama.cpp saves all of each piece.

        Of a windowed cache it saves the last window alone.
        """
        if self._window:
            step = min(step or self._window, max(self._window // 2, 1))
        if step is None:
            return [(start, stop)]
        return list(pairwise([start, *range((start // step + 1) * step, stop, step), stop]))

    def take(self, sequence: int, start: int, end: int) -> State:
        """Return what llama.cpp saves of positions start..end-1 of a sequence; end -1 is the whole of it."""
        try:
            self._sequences.share(sequence, self._number, start, end)
            return self._saved()
        finally:
            self._clear()

    def put(self, state: State, first: int, holders: Iterable[tuple[int, int]]) -> int:
        """Restore a state that begins at position `first`; return the position behind it.

        holders: sequences that share it from now on, each with the position where its part ends, -1 for all of it.
        Raises ValueError for data of other positions, of another model, or no data.
        """
        try:
            end = self._lay(state, first)
            for sequence, stop in holders:
                self._sequences.share(self._number, sequence, -1, stop)
            return end
        finally:
            self._clear()

    def put_packed(self, data: bytes, sequence: int, first: int, end: int) -> None:
        """Append what `packed` made of positions first..end-1 to a sequence. Raises ValueError as `put` does.

        What came before an error is in the sequence.
        """
        stored, offset, position = np.frombuffer(data, dtype=np.uint8), 0, first
        while position < end:
            (length,) = _LENGTH.unpack_from(data.ljust(offset + _LENGTH.size), offset)
            offset += _LENGTH.size + length
            position = self.put(stored[offset - length : offset], position, [(sequence, -1)])
        if position != end or offset != len(data):
            raise ValueError(f"the data is not KV of positions {first}..{end}: it has {len(data)} bytes")

    def part(self, state: State, first: int, start: int, end: int) -> State:
        """Return positions start..end-1 of a state that begins at position `first`."""
        try:
            self._lay(state, first)
            self._sequences.remove(self._number, end)
            self._sequences.remove(self._number, -1, start)
            return self._saved()
        finally:
            self._clear()

    def _lay(self, state: State, first: int) -> int:
        route_log()
        data = np.ascontiguousarray(state).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        taken = self._lib.llama_state_seq_set_data(self._context, data, len(state), self._number)
        begin, end = self._sequences.first(self._number), self._sequences.last(self._number) + 1
        if taken != len(state) or end <= first or (self._can_truncate and begin != first):
            raise ValueError(f"the data is not KV of positions {first} and on of this model: {complaints()}")
        return end

    def _saved(self) -> State:
        size = self._lib.llama_state_seq_get_size(self._context, self._number)
        # np.empty asks for huge pages, which Linux may have to make first: four times as long as the copy took.
        state = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = self._lib.llama_state_seq_get_data(self._context, data, size, self._number)
        if written != size:
            raise LlamaCppError(f"llama.cpp wrote {written} of {size} bytes of a sequence's state:\n{complaints()}")
        return state

    def _clear(self) -> None:
        self._sequences.remove(self._number, -1)
