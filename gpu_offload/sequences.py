"""llama.cpp's sequences: which cells belong to which, by llama.cpp's positions, and their KV as bytes.

In layers with a sliding window, llama.cpp treats a cell as free once its position has left the window of its only
sequence, even in a cache opened to keep all positions (find_slot in src/llama-kv-cache.cpp). Cached prefixes would be
overwritten. So every sequence of such a model has a shadow sequence that holds the same cells.

llama.cpp saves and restores whole sequences only, so a range is first shared with a scratch sequence.
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
from gpu_offload.options import LlamaOptions

MAX_NUMBERS = 256  # LLAMA_MAX_SEQ
_LENGTH = struct.Struct("<Q")  # before each of llama.cpp's states


def has_state(model: Any) -> bool:
    """Whether a sequence has a state that cannot be truncated, instead of or beside cells."""
    return bool(llama().llama_model_is_recurrent(model) or llama().llama_model_is_hybrid(model))


def window_of(model: Any) -> int:
    """Return the sliding window in positions; 0 without one, and for models with a state."""
    return 0 if has_state(model) else int(llama().llama_model_n_swa(model))


def sequence_numbers(options: LlamaOptions, window: int) -> int:
    """Return how many sequences a context needs: the callers', their shadows, one scratch. window: from window_of."""
    return (2 if window else 1) * options.max_sequences + 1


class Sequences:
    """The sequences 0..max_sequences-1 of a context, and the scratch sequence after them.

    can_truncate: False if sequences have a state, which is saved whole; a recurrent sequence knows only its last
    position, so its first is not checked. shadowed: whether sequences have shadows.
    """

    def __init__(self, context: Any, options: LlamaOptions) -> None:
        self._lib = llama()
        self._context = context
        self._memory = self._lib.llama_get_memory(context)
        self._scratch = options.max_sequences
        model = self._lib.llama_get_model(context)
        window = window_of(model)
        # llama.cpp saves only the last window of a windowed cache.
        self._longest = max(window // 2, 1) if window else None
        self.shadowed = bool(window)
        self.can_truncate = not has_state(model)

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Share positions start..end-1 of one sequence with another; -1 is the first position, or the end."""
        self._lib.llama_memory_seq_cp(self._memory, source, target, start, end)
        if self.shadowed and target != self._scratch:
            self._lib.llama_memory_seq_cp(self._memory, source, self._shadow(target), start, end)

    def computed(self, sequence: int, start: int) -> None:
        """Record that a sequence has new cells from position `start` on."""
        if self.shadowed:
            self._lib.llama_memory_seq_cp(self._memory, sequence, self._shadow(sequence), start, -1)

    def remove(self, sequence: int, start: int) -> bool:
        """Remove positions from `start` on, all with -1; False if the sequence cannot be truncated there."""
        if self.shadowed and sequence != self._scratch:
            self._lib.llama_memory_seq_rm(self._memory, self._shadow(sequence), start, -1)
        return bool(self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1))

    def save(self, sequence: int, first: int, end: int, whole: bool) -> bytes:
        """Return the KV of positions first..end-1. whole: whether that is all of the sequence."""
        cuts = [first, end] if self._longest is None else [*range(first, end, self._longest), end]
        states = [self._saved(sequence, start, -1 if whole and stop == end else stop) for start, stop in pairwise(cuts)]
        return b"".join(part for state in states for part in (_LENGTH.pack(len(state)), state.data))

    def restore(self, data: bytes | memoryview, sequence: int, first: int, end: int) -> None:
        """Append what `save` returned for positions first..end-1.

        Raises ValueError for data of other positions, of another model, or no data; what was restored before the error
        stays in the sequence.
        """
        stored, offset, position = np.frombuffer(data, dtype=np.uint8), 0, first
        while position < end:
            (length,) = _LENGTH.unpack(bytes(data[offset : offset + _LENGTH.size]).ljust(_LENGTH.size))
            offset += _LENGTH.size + length
            position = self._restored(stored[offset - length : offset], sequence, position)
        if position != end or offset != len(data):
            raise ValueError(f"the data is not KV of positions {first}..{end}: it has {len(data)} bytes")

    def _saved(self, sequence: int, first: int, end: int) -> NDArray[np.uint8]:
        """llama.cpp's state of positions first..end-1; -1 is the end of the sequence."""
        try:
            self.share(sequence, self._scratch, first, end)
            size = self._lib.llama_state_seq_get_size(self._context, self._scratch)
            # np.empty requests huge pages, which Linux may have to create first: that took four times as long as the
            # copy.
            state = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
            data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            written = self._lib.llama_state_seq_get_data(self._context, data, size, self._scratch)
            if written != size:
                raise LlamaCppError(f"llama.cpp wrote {written} of {size} bytes of a sequence's state:\n{complaints()}")
            return state
        finally:
            self.remove(self._scratch, -1)

    def _restored(self, state: NDArray[np.uint8], sequence: int, first: int) -> int:
        """Append a state that begins at position `first`; return the position after it."""
        route_log()
        data = np.ascontiguousarray(state).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        try:
            taken = self._lib.llama_state_seq_set_data(self._context, data, len(state), self._scratch)
            begin = int(self._lib.llama_memory_seq_pos_min(self._memory, self._scratch))
            end = int(self._lib.llama_memory_seq_pos_max(self._memory, self._scratch)) + 1
            if taken != len(state) or end <= first or (self.can_truncate and begin != first):
                raise ValueError(f"the data is not KV of positions {first} and on of this model: {complaints()}")
            self.share(self._scratch, sequence, -1, -1)
            return end
        finally:
            self.remove(self._scratch, -1)

    def _shadow(self, sequence: int) -> int:
        return self._scratch + 1 + sequence
