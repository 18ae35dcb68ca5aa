"""The contract between the engine and whatever computes logits.

Two implementations: `models.NativeRunner` (our CPU kernels) and `gpu_offload.LlamaCppRunner`. A runner owns the weights
and the storage of keys and values, and nothing else: no requests, no sampling, no text. It is not thread-safe; the
engine's own thread is its only caller. The contract uses plain numbers and arrays, so that implementations need not
import anything from here.
"""

import threading
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gguf_io.runner_info import RunnerInfo

# Adapters by number, each with its weight; ascending, none with weight 0. The same type as gpu_offload.adapters'.
AdapterSet = tuple[tuple[int, float], ...]


class Runner(Protocol):
    """Sequences of tokens in, logits out.

    A sequence is a small integer handle to an append-only list of positions 0..length-1 whose keys and values are
    stored. Storage is counted in pages of `info.page_size` tokens; sequences made by `fork_sequence` share pages, and a
    shared page is copied before it is written.
    """

    @property
    def info(self) -> RunnerInfo:
        """What the runner is and can do; the same record always."""

    def pages_free(self) -> int:
        """Pages that can still be taken within the budget."""

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

        tokens, positions, sequences: one entry per row, at most max_rows. The rows of one sequence stand together, in
        order, and their positions continue the sequence's length. wanted: indices of rows, ascending.
        Returns float32[len(wanted), vocab_size], valid until the next call. A row's logits do not depend on the other
        rows. Raises before anything is changed if a token, position or sequence is out of range or pages run out.
        """

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        """Return the keys and values of positions start..stop-1 in the runner's own format (see info.kv_layout)."""

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        """Append what export_kv returned; start must equal the sequence's length. Raises ValueError on a wrong size."""

    def check_integrity(self, sequences: set[int]) -> None:
        """Raise RuntimeError unless exactly these sequences are alive, and pages and sequences agree."""

    def close(self) -> None:
        """Free weights, KV storage and threads. Idempotent."""


@runtime_checkable
class Interruptible(Protocol):
    """What a Runner has beyond others if a long run of it can be ended early, where `info.can_interrupt` says so."""

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
class DraftsItself(Protocol):
    """What a Runner has beyond others if the model itself can guess further tokens, where `info.can_draft` says so."""

    def follow(self, wanted: Sequence[tuple[int, int, int]]) -> None:
        """Read what `draft` needs of sequences and was not read yet; `draft` does so, too, where this did not."""

    def draft(self, wanted: Sequence[tuple[int, int, int]]) -> list[list[int]]:
        """Guess what comes next in sequences, each once; no sequence changes.

        wanted: a sequence, the token that follows what it stores, and at most how many tokens are to follow that one.
        A sequence may get fewer, or none.
        """


@runtime_checkable
class KeepsStates(Protocol):
    """What a Runner has beyond others if layers keep states, which rows need beside keys and values.

    Where a sequence goes on without its state, the rows since the last known one are computed again.
    """

    def export_state(self, sequence: int, length: int) -> bytes:
        """Return the state behind the first `length` positions; empty where it is not known, or there is none."""

    def import_state(self, sequence: int, data: bytes | memoryview) -> None:
        """Take what export_state returned for as many positions as are stored. Raises ValueError on a wrong size."""


class ImageRows(Protocol):
    """A run of an image's rows. sees_all: they attend to each other in both directions and form one batch."""

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def embeddings(self) -> NDArray[np.float32]: ...

    @property
    def sees_all(self) -> bool: ...


# An encoded image: runs of rows, and token ids before, between and after them.
ImagePieces = Sequence[ImageRows | tuple[int, ...]]


class Projector(Protocol):
    """Encodes images. Thread-safe."""

    def see(self, data: bytes) -> ImagePieces: ...


@runtime_checkable
class SeesImages(Protocol):
    """The additional interface of a Runner that reads images. projector: None if the model was loaded without one."""

    @property
    def projector(self) -> Projector | None: ...

    def append_image(self, sequence: int, image: Any) -> None:
        """Append rows from the projector to a sequence, as Runner.run appends tokens, without logits."""
