"""The engine's Runner on llama.cpp: any architecture it supports, on any device it was built for.

Sequences are llama.cpp's own: a fork shares cells of one unified KV cache, and a cell is a page of one token.
"""

import ctypes
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_io.image_rows import ImageRows
from gguf_io.model_file import ModelFile
from gguf_io.runner_info import AdapterSet, LoadProgress, RunnerInfo
from gpu_offload.adapters import Adapters
from gpu_offload.cells import CellPool, StoredCells, check_room, check_rows, check_tokens
from gpu_offload.decoding import Decoder
from gpu_offload.errors import LlamaCppError
from gpu_offload.library import llama
from gpu_offload.loading import load_model, open_context
from gpu_offload.memory import kv_bytes_per_token
from gpu_offload.options import COPIES_SHARE, LlamaOptions
from gpu_offload.projector import LlamaProjector
from gpu_offload.sequences import Sequences

logger = logging.getLogger("localllm.gpu_offload")

_POLL_S = 0.005
_LAYOUT = 1  # version of exported KV; a new one invalidates what older versions stored


class LlamaCppRunner:
    """Sequences of tokens in, logits out; implements localllm.engine.runner.Runner.

    Logits equal llama.cpp's own for one sequence, and differ in the last bits when a batch holds others. Recurrent and
    hybrid models set can_truncate to False: their sequences are forked, exported and imported whole, and can only be
    truncated to nothing. projector: the image encoder for append_image, if the model was loaded with one.
    """

    def __init__(self, model: ModelFile, options: LlamaOptions, progress: LoadProgress | None = None) -> None:
        """Load the model and open its context. progress is called on this thread; an exception in it ends the load.

        Raises LlamaCppError and its subclasses, or ValueError for a bad option.
        """
        self._lib = library = llama()
        self.projector: LlamaProjector | None = None
        with ExitStack() as opened:
            self._model: Any = load_model(model, options, progress)
            opened.callback(library.llama_model_free, self._model)
            if library.llama_model_has_encoder(self._model):
                raise LlamaCppError(f"{model.path} has an encoder and does not continue text by itself.")
            self._adapters = Adapters(self._model, model, options.lora)
            if options.mmproj is not None:
                self.projector = LlamaProjector(options.mmproj, self._model, options)
                opened.callback(self.projector.close)
            self._open_context: Any = open_context(self._model, options)
            opened.callback(library.llama_free, self._open_context)
            if not library.llama_get_memory(self._context):
                raise LlamaCppError(f"{model.path} keeps no keys and values, so it does not generate text.")
            self._resources = opened.pop_all()
        self._pool = CellPool(library.llama_n_ctx(self._context))
        self._alive: dict[int, StoredCells] = {}
        self._sequences = Sequences(self._context, options)
        vocabulary = int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model)))
        self._decoder = Decoder(self._context, self._sequences, options, vocabulary, self._adapters)
        kv_bytes = kv_bytes_per_token(model, options.type_k, options.type_v)
        on_cpu = options.gpu_layers == 0 or not library.llama_supports_gpu_offload()
        # On the CPU llama.cpp computes attention over all cells up to the last one in use, even of other sequences.
        moves = on_cpu and self._sequences.can_truncate
        types = f"{options.type_k}/{options.type_v}/flash=None"  # llama.cpp chooses
        self.info = RunnerInfo(
            backend="llama.cpp",
            vocab_size=vocabulary,
            max_context=int(library.llama_model_n_ctx_train(self._model)),
            max_rows=options.batch_rows,
            max_sequences=options.max_sequences,
            page_size=1,  # llama.cpp's cell
            pages_total=self._pool.total,
            kv_bytes_per_token=kv_bytes,
            kv_layout=f"llama.cpp/{library.LLAMA_STATE_SEQ_VERSION}.{_LAYOUT}/{types}",
            kv_files=model.states,
            can_truncate=self._sequences.can_truncate,
            can_interrupt=moves,
            copies_bytes=kv_bytes * self._pool.total // COPIES_SHARE if moves else 0,
            adapter_files=tuple(self._adapters.files),
            computes_aside=not on_cpu,
        )

    def pages_free(self) -> int:
        return self._pool.free

    def page_holders(self) -> NDArray[np.int32]:
        return self._pool.holders()

    def pages_needed(self, sequence: int, tokens: int) -> int:
        """Cells that appending `tokens` tokens takes: one each, since a shared cell is never written."""
        self._stored(sequence)
        return tokens

    def create_sequence(self, adapters: AdapterSet = ()) -> int:
        """Return the handle of a new, empty sequence. Raises LlamaCppError when max_sequences are alive."""
        self._adapters.check(adapters)
        sequence = self._new_handle()
        self._alive[sequence] = StoredCells(adapters)
        return sequence

    def fork_sequence(self, source: int, length: int) -> int:
        """Return a new sequence that shares the first `length` tokens of `source`; it takes no cells."""
        stored = self._cuttable(source, length)
        target = self._new_handle()
        if length:
            whole = length == len(stored)  # the only range that recurrent models copy
            self._sequences.share(source, target, 0, -1 if whole else stored.position(length))
        self._alive[target] = stored.up_to(length)
        self._pool.share(self._alive[target].cells)
        return target

    def truncate_sequence(self, sequence: int, length: int) -> None:
        if length < len(self._cuttable(sequence, length)):
            self._forget(sequence, length)
            self._release(sequence, length)

    def free_sequence(self, sequence: int) -> None:
        """Free the handle, and the cells that no other sequence shares."""
        self._stored(sequence)
        self._forget(sequence, 0)
        self._release(sequence, 0)
        del self._alive[sequence]

    def check_integrity(self, sequences: set[int]) -> None:
        if self._alive.keys() != sequences:
            raise RuntimeError(f"sequences alive: {sorted(self._alive)}, expected: {sorted(sequences)}")

    def sequence_length(self, sequence: int) -> int:
        return len(self._stored(sequence))

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[int],
    ) -> NDArray[np.float32]:
        """Append rows to sequences and return the logits of the wanted ones: float32[len(wanted), vocab_size].

        The result is valid until the next call, including close. Raises ValueError, or LlamaCppMemoryError if cells run
        out, before anything is changed; LlamaCppError if the computation fails, with the rows removed again.
        """
        return self.prepare(positions, sequences, wanted)(tokens)()

    def prepare(
        self, positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> Callable[[Sequence[int]], Callable[[], NDArray[np.float32]]]:
        """Like `run`, but return a function that takes the tokens and begins; its result waits for the logits.

        GPUs go on computing after the first of them, the CPU computes within it.
        """
        _ = self._context  # raises if the runner is closed
        appended = check_rows(positions, sequences, wanted, self.info, self._alive, self._pool)
        decode = self._decoder.prepare(positions, sequences, wanted, self._alive)

        def begin(tokens: Sequence[int]) -> Callable[[], NDArray[np.float32]]:
            _ = self._context
            check_tokens(tokens, len(positions), self.info)
            try:
                logits = decode(tokens)
            except LlamaCppError:
                self._take_back({sequence: len(self._alive[sequence]) for sequence in appended})
                raise
            for sequence, count in appended.items():  # while a GPU computes
                self._append(sequence, count)
            return logits

        return begin

    def run_unless(
        self,
        stop: threading.Event,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[int],
    ) -> NDArray[np.float32] | None:
        """Like `run`, but cancelled soon after another thread sets `stop`: returns None, with nothing changed."""
        try:
            with interruptible(self._context, stop):
                return self.run(tokens, positions, sequences, wanted)
        except LlamaCppError:
            if not stop.is_set():
                raise
            return None

    def append_image(self, sequence: int, image: ImageRows, position: int) -> None:
        """Append an image's rows to a sequence; rows that attend in both directions must fit into one run.

        Raises as `run` does, before anything is changed or with the rows removed again.
        """
        stored = self._stored(sequence)
        first, count = len(stored), len(image.ids)
        width, shape = int(self._lib.llama_model_n_embd_inp(self._model)), image.embeddings.shape
        if shape != (count, width) or not count or (image.sees_all and count > self.info.max_rows):
            raise ValueError(f"embeddings of shape {shape} are not rows of {width}, at most {self.info.max_rows}")
        if first + count > self.info.max_context:
            raise ValueError(f"sequence {sequence} would grow beyond the model's {self.info.max_context} positions")
        if position != stored.position(first):
            raise ValueError(f"the image's position does not continue sequence {sequence} at {stored.position(first)}")
        check_room(count, self._pool)
        self._append(sequence, count)
        try:
            self._decoder.append_image(sequence, image, position, stored.adapters)
        except LlamaCppError:
            self._take_back({sequence: first})
            raise
        stored.add_image(first, image)

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        """Return the keys and values of positions start..stop-1."""
        stored = self._cuttable(sequence, stop)
        if not 0 <= start < stop or (start and not self.info.can_truncate):
            raise ValueError(f"cannot export positions {start}..{stop} of sequence {sequence}")
        first, end = stored.position(start), stored.position(stop)
        return self._sequences.save(sequence, first, end, whole=stop == len(stored))

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        """Append what export_kv returned for the same positions; start must equal the sequence's length.

        Raises ValueError for data of other positions, another size, model or KV type, and LlamaCppMemoryError if cells
        run out; the sequence is then unchanged.
        """
        stored = self._stored(sequence)
        if start != len(stored) or stop <= start or (start and not self.info.can_truncate):
            raise ValueError(f"cannot import positions {start}..{stop} into sequence {sequence}")
        check_room(stop - start, self._pool)
        first = stored.position(start)
        try:
            self._sequences.restore(data, sequence, first, first + stop - start)
        except ValueError:
            self._forget(sequence, start)
            raise
        self._append(sequence, stop - start)

    def close(self) -> None:
        """Free the context, the projector and the model. Idempotent."""
        self._open_context = None
        self._resources.close()

    @property
    def _context(self) -> Any:
        if self._open_context is None:
            raise ValueError("this runner is closed")
        return self._open_context

    def _new_handle(self) -> int:
        _ = self._context  # raises if the runner is closed
        for sequence in range(self.info.max_sequences):
            if sequence not in self._alive:
                return sequence
        raise LlamaCppError(f"all {self.info.max_sequences} sequences are in use; free one or raise max_sequences.")

    def _append(self, sequence: int, count: int) -> None:
        stored = self._alive[sequence]
        stored.cells = np.concatenate([stored.cells, self._pool.take(count)])

    def _release(self, sequence: int, length: int) -> None:
        """Release the cells of rows that llama.cpp has forgotten, those from `length` on."""
        stored = self._alive[sequence]
        self._pool.release(stored.cells[length:])
        self._alive[sequence] = stored.up_to(length)

    def _forget(self, sequence: int, start: int) -> bool:
        """Remove rows from `start` on, or all if it cannot be truncated there; return whether earlier rows are kept."""
        if start and self._sequences.remove(sequence, self._alive[sequence].position(start)):
            return True
        self._sequences.remove(sequence, -1)
        return start == 0

    def _take_back(self, lengths: dict[int, int]) -> None:
        """Truncate sequences to their lengths before a failed computation."""
        for sequence, length in lengths.items():
            self._release(sequence, length if self._forget(sequence, length) else 0)

    def _stored(self, sequence: int) -> StoredCells:
        """Raises ValueError for an unknown sequence, and once the runner is closed."""
        _ = self._context
        if sequence not in self._alive:
            raise ValueError(f"there is no sequence {sequence}")
        return self._alive[sequence]

    def _cuttable(self, sequence: int, length: int) -> StoredCells:
        """A sequence that can be truncated to this length. Raises ValueError."""
        stored = self._stored(sequence)
        if not 0 <= length <= len(stored):
            raise ValueError(f"sequence {sequence} has {len(stored)} positions, not {length}")
        if length not in (0, len(stored)) and not self.info.can_truncate:
            raise ValueError(
                f"this model's state cannot be truncated: keep {len(stored)} positions of sequence {sequence}, or none"
            )
        return stored


@contextmanager
def interruptible(context: Any, stop: threading.Event) -> Iterator[None]:
    """Make llama_decode fail soon after another thread sets `stop`; works only where the CPU computes.

    llama.cpp calls its abort callback between the operations of a graph, a thousand times a step. A Python callback
    would cost more than the step, so the callback reads a byte, set by a thread that polls the event.
    """
    library = llama()
    flag, ended = np.zeros(2, np.uint8), threading.Event()
    flag[0] = stop.is_set()

    def watch() -> None:
        while not (flag[0] or ended.wait(_POLL_S)):
            flag[0] = stop.is_set()

    watcher = threading.Thread(target=watch, name="llama.cpp-stop", daemon=True)
    watcher.start()
    library.llama_set_abort_callback(context, _is_set(), flag.ctypes.data)
    try:
        yield
    finally:
        library.llama_set_abort_callback(context, library.ggml_abort_callback(), None)
        ended.set()
        watcher.join()


@functools.cache
def _is_set() -> Any:
    """Return a ggml_abort_callback in C: strlen of the byte and the 0 after it is 1 once the byte is set."""
    library = ctypes.CDLL("msvcrt") if sys.platform == "win32" else ctypes.CDLL(None)
    return ctypes.cast(library.strlen, llama().ggml_abort_callback)
