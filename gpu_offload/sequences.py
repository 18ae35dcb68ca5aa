"""llama.cpp's sequences: which cells belong to whom, in its own count of positions.

Where layers have a sliding window, llama.cpp takes a cell whose position has left the window of its only sequence for
free, even in a cache that was made to keep all positions (find_slot in src/llama-kv-cache.cpp). Prefixes kept for later
would be overwritten. So there every sequence has a shadow, which holds the same cells.
"""

from typing import Any

from gpu_offload.library import llama
from gpu_offload.options import LlamaOptions

MAX_NUMBERS = 256  # LLAMA_MAX_SEQ


def window_of(model: Any) -> int:
    """How many positions layers with a sliding window look back; 0 where there are none, or states, never cut."""
    library = llama()
    if library.llama_model_is_recurrent(model) or library.llama_model_is_hybrid(model):
        return 0
    return int(library.llama_model_n_swa(model))


def sequence_numbers(options: LlamaOptions, window: int) -> int:
    """How many sequences a context needs: those of its users, a scratch one, and shadows. window: from window_of."""
    return (2 if window else 1) * options.max_sequences + 1


class Sequences:
    """The sequences 0..max_sequences-1 of a context, and `scratch`, the number behind them.

    shadowed: whether all but the scratch sequence have shadows.
    """

    def __init__(self, context: Any, options: LlamaOptions, window: int) -> None:
        self._lib = llama()
        self._memory = self._lib.llama_get_memory(context)
        self.scratch = options.max_sequences
        self.shadowed = bool(window)

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Let a sequence have another's positions start..end-1 too; -1 is the first, and the one behind the last."""
        self._lib.llama_memory_seq_cp(self._memory, source, target, start, end)
        if self.shadowed and target != self.scratch:
            self._lib.llama_memory_seq_cp(self._memory, source, self._shadow(target), start, end)

    def computed(self, sequence: int, start: int) -> None:
        """Note that a sequence has new cells, from position `start` on."""
        if self.shadowed:
            self._lib.llama_memory_seq_cp(self._memory, sequence, self._shadow(sequence), start, -1)

    def remove(self, sequence: int, start: int) -> bool:
        """Take positions from `start` on from a sequence, all with -1; False where it cannot be cut there."""
        if self.shadowed and sequence != self.scratch:
            self._lib.llama_memory_seq_rm(self._memory, self._shadow(sequence), start, -1)
        return bool(self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1))

    def first(self, sequence: int) -> int:
        """The first position of a sequence, -1 if it has none."""
        return int(self._lib.llama_memory_seq_pos_min(self._memory, sequence))

    def last(self, sequence: int) -> int:
        """The last position of a sequence, -1 if it has none."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, sequence))

    def _shadow(self, sequence: int) -> int:
        return self.scratch + 1 + sequence
