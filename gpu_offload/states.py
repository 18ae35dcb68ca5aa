"""KV of a range of positions as bytes, and back.

llama.cpp saves and restores whole sequences alone, so a range is first shared with a scratch sequence that nobody else
uses (`Sequences.scratch`).
"""

import ctypes
import mmap
import struct
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_offload.errors import LlamaCppError
from gpu_offload.library import complaints, llama, route_log
from gpu_offload.sequences import Sequences

_LENGTH = struct.Struct("<Q")  # before each of llama.cpp's states


class States:
    """Export and import of ranges on one context.

    window: positions that layers with a sliding window look back, 0 where there are none. can_truncate: False for
    states that are saved whole; a recurrent one knows only its last position, so that its first is not checked.
    """

    def __init__(self, context: Any, sequences: Sequences, window: int, can_truncate: bool) -> None:
        self._lib = llama()
        self._context = context
        self._sequences = sequences
        self._scratch = sequences.scratch
        # Of a windowed cache llama.cpp saves the last window alone.
        self._longest = max(window // 2, 1) if window and can_truncate else None
        self._can_truncate = can_truncate

    def save(self, sequence: int, first: int, end: int, whole: bool) -> bytes:
        """Return the KV of positions first..end-1. whole: this is all of the sequence."""
        cuts = [first, end] if self._longest is None else [*range(first, end, self._longest), end]
        states = [
            self._saved(sequence, start, -1 if whole and len(cuts) == 2 else stop) for start, stop in pairwise(cuts)
        ]
        return b"".join(part for state in states for part in (_LENGTH.pack(len(state)), state.data))

    def restore(self, data: bytes, sequence: int, first: int, end: int) -> None:
        """Append what `save` returned for positions first..end-1 to a sequence.

        Raises ValueError for data of other positions, of another model, or no data; what came before the error is then
        in the sequence.
        """
        stored, offset, position = np.frombuffer(data, dtype=np.uint8), 0, first
        while position < end:
            (length,) = _LENGTH.unpack_from(data.ljust(offset + _LENGTH.size), offset)
            offset += _LENGTH.size + length
            position = self._restored(stored[offset - length : offset], sequence, position)
        if position != end or offset != len(data):
            raise ValueError(f"the data is not KV of positions {first}..{end}: it has {len(data)} bytes")

    def _saved(self, sequence: int, first: int, end: int) -> NDArray[np.uint8]:
        """What llama.cpp saves of positions first..end-1; -1 is the end of the sequence."""
        try:
            self._sequences.share(sequence, self._scratch, first, end)
            size = self._lib.llama_state_seq_get_size(self._context, self._scratch)
            # np.empty asks for huge pages, which Linux may have to make first: four times as long as the copy took.
            state = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
            data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            written = self._lib.llama_state_seq_get_data(self._context, data, size, self._scratch)
            if written != size:
                raise LlamaCppError(f"llama.cpp wrote {written} of {size} bytes of a sequence's state:\n{complaints()}")
            return state
        finally:
            self._sequences.remove(self._scratch, -1)

    def _restored(self, state: NDArray[np.uint8], sequence: int, first: int) -> int:
        """Append a state that begins at position `first` to a sequence; return the position behind it."""
        route_log()
        data = np.ascontiguousarray(state).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        try:
            taken = self._lib.llama_state_seq_set_data(self._context, data, len(state), self._scratch)
            begin, end = self._sequences.first(self._scratch), self._sequences.last(self._scratch) + 1
            if taken != len(state) or end <= first or (self._can_truncate and begin != first):
                raise ValueError(f"the data is not KV of positions {first} and on of this model: {complaints()}")
            self._sequences.share(self._scratch, sequence, -1, -1)
            return end
        finally:
            self._sequences.remove(self._scratch, -1)
