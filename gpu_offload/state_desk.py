"""llama.cpp's saved states of ranges: it saves whole sequences, so a range is laid on one that nobody else uses."""

import ctypes
from typing import Any

from gpu_offload.errors import LlamaCppError
from gpu_offload.library import complaints, llama


class StateDesk:
    """A sequence number of a context, beyond those of its users, on which ranges are laid for export and import."""

    def __init__(self, context: Any, number: int) -> None:
        self._lib = llama()
        self._context = context
        self._memory = self._lib.llama_get_memory(context)
        self._number = number

    def take(self, sequence: int, start: int, end: int) -> bytes:
        """Return what llama.cpp saves of positions start..end-1 of a sequence; end -1 is the whole of it."""
        try:
            self._lib.llama_memory_seq_cp(self._memory, sequence, self._number, start, end)
            size = self._lib.llama_state_seq_get_size(self._context, self._number)
            buffer = (ctypes.c_uint8 * size)()
            written = self._lib.llama_state_seq_get_data(self._context, buffer, size, self._number)
        finally:
            self._clear()
        if written != size:
            raise LlamaCppError(f"llama.cpp wrote {written} of {size} bytes of a sequence's state:\n{complaints()}")
        return bytes(buffer)

    def put(self, sequence: int, start: int, stop: int, state: bytes, can_truncate: bool) -> None:
        """Restore positions start..stop-1 and, if they are those expected, share them with the sequence.

        A recurrent state, which cannot be truncated, knows only its last position, so that its first is not checked.
        Raises ValueError for data of other positions or of another model.
        """
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        try:
            taken = self._lib.llama_state_seq_set_data(self._context, buffer, len(state), self._number)
            first = self._lib.llama_memory_seq_pos_min(self._memory, self._number)
            last = self._lib.llama_memory_seq_pos_max(self._memory, self._number)
            if taken != len(state) or last != stop - 1 or (can_truncate and first != start):
                raise ValueError(f"the data is not KV of positions {start}..{stop} of this model: {complaints()}")
            self._lib.llama_memory_seq_cp(self._memory, self._number, sequence, -1, -1)
        finally:
            self._clear()

    def _clear(self) -> None:
        self._lib.llama_memory_seq_rm(self._memory, self._number, -1, -1)
