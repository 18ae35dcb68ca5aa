"""The contract between the engine and whatever computes logits.

Two implementations: `models.NativeRunner` (our CPU kernels) and `gpu_offload.LlamaCppRunner`. A runner owns the weights
and the storage of keys and values, and nothing else: no requests, no sampling, no text. It is not thread-safe; the
engine's own thread is its only caller. The contract uses plain numbers and arrays only, so that implementations need
not import anything from here.
"""

import threading
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localllm.engine.adapters import AdapterSet


class Runner(Protocol):
    """Sequences of tokens in, logits out.

    A sequence is a small integer handle to an append-only list of positions 0..length-1 whose keys and values are
    stored. Storage is counted in pages of `page_size` tokens; sequences made by `fork_sequence` share pages, and a
    shared page is copied before it is written.
    """

    @property
    def backend(self) -> str:
        """Short name for people, e.g. "native" or "llama.cpp"."""

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""

    @property
    def max_context(self) -> int:
        """Longest sequence the model was trained for (or stretched to), in tokens."""

    @property
    def max_rows(self) -> int:
        """Most rows that one `run` takes."""

    @property
    def max_sequences(self) -> int:
        """Most sequence handles alive at once."""

    @property
    def page_size(self) -> int:
        """Tokens in a page of KV storage."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes over all layers."""

    @property
    def kv_identity(self) -> str:
        """What stored KV depends on besides tokens: model file, KV types, layout version. Keys the disk tier."""

    @property
    def can_truncate(self) -> bool:
        """Whether sequences can be cut back to any length (recurrent models cannot)."""

    @property
    def adapter_count(self) -> int:
        """LoRA adapters that sequences may be computed with."""

    def pages_free(self) -> int:
        """Pages that can still be taken within the budget."""

    def pages_total(self) -> int:
        """Pages of the whole budget, used or not."""

    def page_holders(self) -> NDArray[np.int32]:
        """How many sequences hold each page, 0 for a free one, about in the order in which pages are first taken.

        Pages behind the last entry are free. A copy: it does not change with the storage.
        """

    def pages_needed(self, sequence: int, tokens: int) -> int:
        """Pages that appending this many tokens to the sequence would take, copies of shared pages included."""

    def create_sequence(self, adapters: AdapterSet = ()) -> int:
        """Return the handle of a new, empty sequence, to be computed with these LoRA adapters; forks inherit them."""

    def fork_sequence(self, source: int, length: int) -> int:
        """Return a new sequence that shares the first `length` tokens of `source`. Takes no page.

        A shared last page that is not full is copied when it is first written; pages_needed counts the copy.
        """

    def truncate_sequence(self, sequence: int, length: int) -> None:
        """Forget all positions from `length` on."""

    def free_sequence(self, sequence: int) -> None:
        """Give the handle and the pages that no other sequence shares back."""

    def sequence_length(self, sequence: int) -> int:
        """Number of positions stored."""

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[int],
    ) -> NDArray[np.float32]:
        """Append rows to sequences and return the logits of the wanted ones.

        tokens, positions, sequences: one entry a row, rows <= max_rows. The rows of one sequence stand together, in
        order, and their positions continue the sequence's length. wanted: indices of rows, ascending.
        Returns float32[len(wanted), vocab_size], valid until the next call. A row's logits do not depend on the other
        rows. Raises before anything is changed if a token, position or sequence is out of range or pages run out.
        """

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        """Return the keys and values of positions start..stop-1 in the runner's own format (see kv_identity)."""

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes) -> None:
        """Append what export_kv returned; start must equal the sequence's length. Raises ValueError on a wrong size."""

    def close(self) -> None:
        """Free weights, KV storage and threads. Idempotent."""


@runtime_checkable
class Interruptible(Protocol):
    """What a Runner has beyond others if a long run of it can be ended early."""

    @property
    def can_interrupt(self) -> bool:
        """Whether it can with this model, where it lies."""

    def run_unless(
        self,
        stop: threading.Event,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[int],
    ) -> NDArray[np.float32] | None:
        """Like Runner.run, but give up soon after another thread has set `stop`: None, with nothing changed."""


@runtime_checkable
class KeepsCopies(Protocol):
    """What a Runner has beyond others if all of its storage is allocated at once, and what rests there costs others.

    Prefixes that are only cached then move out to copies in main memory (localllm/engine/memory_tier.py).
    """

    @property
    def copies_bytes(self) -> int:
        """Main memory that was planned for copies; 0 where nothing is to move."""
