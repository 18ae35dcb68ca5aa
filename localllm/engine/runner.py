"""The interface between the engine and the backends that compute logits.

Two implementations: `models.native_runner.NativeRunner` (our CPU kernels) and `gpu_offload.runner.LlamaCppRunner`. A
runner owns the weights and the storage of keys and values, and nothing else: no requests, no sampling, no text. It is
not thread-safe; the engine's own thread is its only caller. The interface uses plain numbers and arrays, so
implementations need not import anything from here.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gguf_io.image_rows import ImageRows, ImageSpans, SeenPicture, SeenPieces
from gguf_io.media import Size
from gguf_io.pictures import Budget, Picture
from gguf_io.runner_info import AdapterSet, RunnerInfo
from gguf_io.sounds import Samples


class Runner(Protocol):
    """Sequences of tokens in, logits out.

    A sequence is a small integer handle to an append-only list of positions 0..length-1 whose keys and values are
    stored. Storage is counted in pages of `info.page_size` tokens; sequences made by `fork_sequence` share pages, and a
    shared page is copied before it is written.
    """

    @property
    def info(self) -> RunnerInfo:
        """The runner's description and capabilities; always the same record."""

    def pages_free(self) -> int:
        """Pages that can still be allocated within the budget."""

    def page_holders(self) -> NDArray[np.int32]:
        """How many sequences hold each page, 0 for a free one, roughly in the order in which pages are first allocated.

        Pages after the last entry are free. A copy: it does not change with the storage.
        """

    def pages_needed(self, sequence: int, tokens: int) -> int:
        """Pages that appending `tokens` tokens to the sequence would take, including copies of shared pages."""

    def create_sequence(self, adapters: AdapterSet = ()) -> int:
        """Return the handle of a new, empty sequence that is computed with these LoRA adapters; forks inherit them."""

    def fork_sequence(self, source: int, length: int) -> int:
        """Return a new sequence that shares the first `length` tokens of `source`. Takes no page.

        A shared last page that is not full is copied when it is first written; pages_needed counts the copy.
        """

    def truncate_sequence(self, sequence: int, length: int) -> None:
        """Remove all positions from `length` on."""

    def free_sequence(self, sequence: int) -> None:
        """Free the handle, and the pages that no other sequence shares."""

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

        tokens, positions, sequences: one entry per row, at most max_rows. The rows of one sequence are contiguous and
        in order, and their positions continue from the sequence's length, or from the end of its latest image, which
        may have fewer positions than rows. wanted: indices of rows, ascending.
        Returns float32[len(wanted), vocab_size], valid until the next call. A row's logits do not depend on the other
        rows. Raises before anything is changed if a token, position or sequence is out of range or pages run out.
        """

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        """Return the keys and values of positions start..stop-1 in the runner's own format (see info.kv_layout)."""

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        """Append the result of export_kv; start must equal the sequence's length. Raises ValueError on a wrong size."""

    def check_integrity(self, sequences: set[int]) -> None:
        """Raise RuntimeError unless exactly these sequences exist, and pages and sequences agree."""

    def close(self) -> None:
        """Free weights, KV storage and threads. Idempotent."""


@runtime_checkable
class Interruptible(Protocol):
    """Additional interface of a Runner whose run can be interrupted. Only effective if `info.can_interrupt`."""

    def run_unless(
        self,
        stop: threading.Event,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[int],
    ) -> NDArray[np.float32] | None:
        """Like Runner.run, but stop soon after another thread sets `stop`: return None, with nothing changed."""


Begin = Callable[[Sequence[int]], Callable[[], NDArray[np.float32]]]
"""Takes the tokens of rows and begins to compute them. Its result waits for the logits that Runner.run returns, and
must be called before any other method that changes sequences."""


@runtime_checkable
class ComputesAside(Protocol):
    """Additional interface of a Runner whose device computes while the caller does other work.

    Only effective if `info.computes_aside`.
    """

    def prepare(self, positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]) -> Begin:
        """Check and lay out rows as Runner.run does, whose tokens come later.

        May be called while the device computes rows before them. The result must be called before any other method
        that changes sequences, or not at all.
        """


@runtime_checkable
class DraftsItself(Protocol):
    """Additional interface of a Runner whose model can draft by itself. Only effective if `info.can_draft`."""

    def follow(self, wanted: Sequence[tuple[int, int, Sequence[float]]]) -> None:
        """Read the part of the sequences that `draft` needs and has not read yet. Otherwise `draft` reads it."""

    def draft(self, wanted: Sequence[tuple[int, int, Sequence[float]]]) -> list[list[tuple[int, float]]]:
        """Draft the next tokens of sequences, each listed once; no sequence changes.

        wanted: a sequence, the token after its stored ones, and for each token to draft after that token the least
        likelihood of the drafted ones before it; if only a part of the sequences got the token before, it must be as
        much greater. A sequence may get fewer tokens, or none. Returns tokens with their probabilities.
        """


@runtime_checkable
class KeepsStates(Protocol):
    """Additional interface of a Runner whose layers keep states, which rows need beside keys and values.

    If a sequence continues without its state, the rows since the last known state are recomputed.
    """

    def export_state(self, sequence: int, length: int) -> bytes:
        """Return the state after the first `length` positions; empty if it is unknown or there is none."""

    def import_state(self, sequence: int, data: bytes | memoryview) -> None:
        """Set the state that export_state returned for the stored length. Raises ValueError on a wrong size."""


@runtime_checkable
class RecomputesImages(Protocol):
    """Additional interface of a Runner that may have to compute rows of images again, because of states."""

    def know_images(self, sequence: int, images: ImageSpans | None) -> None:
        """Set the images of a sequence that rows are appended to; None when it is only kept."""


@runtime_checkable
class KeepsWindows(Protocol):
    """Additional interface of a Runner that keeps sliding-window layers only where later tokens see them.

    A sequence cut where its window is gone cannot be continued. `run` raises ValueError for such a sequence.
    """

    def reusable(self, sequence: int, length: int) -> int:
        """The most of the first `length` positions after which a sequence, or its fork, can be continued."""

    def keep_window(self, sequence: int, length: int) -> None:
        """Keep the window of the first `length` positions, if it is there, while there is room."""

    def window_use(self) -> tuple[int, int]:
        """What window layers take, in pages: for sequences, and for kept windows, which go when room is needed."""


def window_use(runner: Runner) -> tuple[int, int]:
    """KeepsWindows.window_use of a runner that has it, else zeros."""
    return runner.window_use() if runner.info.window_tokens and isinstance(runner, KeepsWindows) else (0, 0)


def reusable(runner: Runner, sequence: int, length: int) -> int:
    """The most of the first `length` positions of a sequence after which it, or its fork, can be continued."""
    return (
        runner.reusable(sequence, length) if runner.info.window_tokens and isinstance(runner, KeepsWindows) else length
    )


class Projector(Protocol):
    """Encodes pictures and sounds. `see` and `hear` are for one thread at a time, and end before it is closed."""

    def see(self, picture: Picture, content: bytes, budget: Budget) -> SeenPicture:
        """A picture as rows and what the model reads around them. content: a digest of it, of which rows' ids are made.

        Raises PictureError for a picture that the model cannot take.
        """

    def tokens(self, size: Size, budget: Budget) -> int:
        """The rows of a picture of this size, without encoding it. Raises as `see` does."""

    @property
    def sound_rate(self) -> int:
        """How many samples a second it hears. Raises PictureError if it hears nothing."""

    def sound_tokens(self, samples: int) -> int:
        """The rows of a sound of so many samples. Raises PictureError for one that is too long, or as sound_rate."""

    def hear(self, samples: Samples, content: bytes) -> SeenPieces:
        """A sound as rows and what the model reads around them; content as in `see`. Raises as sound_tokens does."""


@runtime_checkable
class SeesImages(Protocol):
    """Additional interface of a Runner that reads images. projector: None if the model was loaded without one."""

    @property
    def projector(self) -> Projector | None: ...

    def append_image(self, sequence: int, image: ImageRows, position: int) -> None:
        """Append rows from the projector to a sequence, from a position on, as Runner.run does tokens, without logits.

        Raises as Runner.run does.
        """


def sees_images(runner: Runner) -> bool:
    """Whether a runner was loaded with a projector."""
    return getattr(runner, "projector", None) is not None  # isinstance of a protocol takes some 20 us
