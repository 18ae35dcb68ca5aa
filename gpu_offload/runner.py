"""The engine's Runner on llama.cpp: any architecture it supports, on any device it was built for.

Sequences are llama.cpp's own: a fork shares cells of one unified KV cache, and a cell is a page of one token.
"""

import ctypes
import functools
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.limits import available_memory
from gguf_io.model_file import ModelFile
from gguf_io.runner_info import RunnerInfo
from gpu_offload.adapters import Adapters, AdapterSet
from gpu_offload.cells import CellBook, RowLimits, check_room, check_rows
from gpu_offload.decoding import Decoder
from gpu_offload.devices import gpus
from gpu_offload.errors import LlamaCppError, LlamaCppMemoryError
from gpu_offload.image_rows import ImageRows, PositionBook
from gpu_offload.library import llama
from gpu_offload.loading import LoadProgress, load_model, open_context
from gpu_offload.memory import kv_bytes_per_token
from gpu_offload.options import COPIES_SHARE, LlamaOptions
from gpu_offload.planner import Plan, PlanRequest, plan
from gpu_offload.projector import Projector
from gpu_offload.sequences import MAX_NUMBERS, Sequences, window_of

logger = logging.getLogger("localllm.gpu_offload")

MAX_SEQUENCES = MAX_NUMBERS - 1  # one is the scratch sequence
_ATTEMPTS = 4
_STEP = 768 * 2**20  # additional bytes kept free on every GPU, per attempt
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
        if not 1 <= options.max_sequences <= MAX_SEQUENCES:
            raise ValueError(f"max_sequences is {options.max_sequences}, outside 1..{MAX_SEQUENCES}")
        self._lib = llama()
        self._options = options
        self._model: Any = load_model(model, options, progress)
        self._open_context: Any = None
        self.projector: Projector | None = None
        try:
            if self._lib.llama_model_has_encoder(self._model):
                raise LlamaCppError(f"{model.path} has an encoder and does not continue text by itself.")
            self._adapters = Adapters(self._model, model, options.lora)
            if options.mmproj is not None:
                self.projector = Projector(options.mmproj, self._model, options)
            self._open_context = open_context(self._model, options)
            if not self._lib.llama_get_memory(self._context):
                raise LlamaCppError(f"{model.path} keeps no keys and values, so it does not generate text.")
        except BaseException:
            self.close()
            raise
        self._book = CellBook(self._lib.llama_n_ctx(self._context))
        self._positions = PositionBook()
        self._chosen: dict[int, AdapterSet] = {}  # the sequences that are computed with adapters
        self._vocab_size = int(self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model)))
        self._max_context = int(self._lib.llama_model_n_ctx_train(self._model))
        self._limits = RowLimits(options.batch_rows, self._vocab_size, self._max_context)
        self._kv_bytes = kv_bytes_per_token(model, options.type_k, options.type_v)
        recurrent = self._lib.llama_model_is_recurrent(self._model) or self._lib.llama_model_is_hybrid(self._model)
        self._can_truncate = not recurrent
        self._sequences = Sequences(self._context, options, window_of(self._model), self._can_truncate)
        self._decoder = Decoder(self._context, self._sequences, options, self._vocab_size, self._adapters)
        on_cpu = options.gpu_layers == 0 or not self._lib.llama_supports_gpu_offload()
        # On the CPU llama.cpp computes attention over all cells up to the last one in use, even of other sequences.
        moves = on_cpu and self._can_truncate
        self.info = RunnerInfo(
            backend="llama.cpp",
            vocab_size=self._vocab_size,
            max_context=self._max_context,
            max_rows=options.batch_rows,
            max_sequences=options.max_sequences,
            page_size=1,  # llama.cpp's cell
            pages_total=self._book.total,
            kv_bytes_per_token=self._kv_bytes,
            kv_layout=self._kv_layout(),
            kv_files=(*model.states, *self._adapters.files),
            can_truncate=self._can_truncate,
            can_interrupt=moves,
            copies_bytes=self._kv_bytes * self._book.total // COPIES_SHARE if moves else 0,
            adapter_count=len(self._adapters),
        )

    def pages_free(self) -> int:
        return self._book.free

    def page_holders(self) -> NDArray[np.int32]:
        return self._book.holders()

    def pages_needed(self, sequence: int, tokens: int) -> int:
        """Cells that appending `tokens` tokens takes: one each, since a shared cell is never written."""
        self._check_sequence(sequence)
        return tokens

    def create_sequence(self, adapters: AdapterSet = ()) -> int:
        """Return the handle of a new, empty sequence. Raises LlamaCppError when max_sequences are alive."""
        self._adapters.check(adapters)
        sequence = self._new_handle()
        self._book.create(sequence)
        if adapters:
            self._chosen[sequence] = adapters
        return sequence

    def fork_sequence(self, source: int, length: int) -> int:
        """Return a new sequence that shares the first `length` tokens of `source`; it takes no cells."""
        self._check_cut(source, length)
        target = self._new_handle()
        if length:
            whole = length == self._book.length(source)  # the only range that recurrent models copy
            self._sequences.share(source, target, 0, -1 if whole else self._positions.at(source, length))
        self._book.create(target)
        self._book.share(source, target, length)
        self._positions.share(source, target, length)
        if source in self._chosen:
            self._chosen[target] = self._chosen[source]
        return target

    def truncate_sequence(self, sequence: int, length: int) -> None:
        self._check_cut(sequence, length)
        if length < self._book.length(sequence):
            self._forget(sequence, length)
            self._book.truncate(sequence, length)
            self._positions.truncate(sequence, length)

    def free_sequence(self, sequence: int) -> None:
        """Free the handle, and the cells that no other sequence shares."""
        self._check_sequence(sequence)
        self._forget(sequence, 0)
        self._book.remove(sequence)
        self._positions.truncate(sequence, 0)
        self._chosen.pop(sequence, None)

    def check_integrity(self, sequences: set[int]) -> None:
        alive = {sequence for sequence in range(self.info.max_sequences) if sequence in self._book}
        if alive != sequences:
            raise RuntimeError(f"sequences alive: {sorted(alive)}, expected: {sorted(sequences)}")

    def sequence_length(self, sequence: int) -> int:
        self._check_sequence(sequence)
        return self._book.length(sequence)

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
        _ = self._context  # raises if the runner is closed
        rows = np.array([tokens, positions, sequences], dtype=np.int64)
        outputs = np.array(wanted, dtype=np.int64)
        appended = check_rows(rows, outputs, self._limits, self._book)
        before = {sequence: self._book.length(sequence) for sequence in appended}
        for sequence, count in appended.items():
            self._book.append(sequence, count)
        try:
            return self._decoder.run(self._positions.of(rows), outputs, self._chosen)
        except LlamaCppError:
            self._take_back(before)
            raise

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

    def append_image(self, sequence: int, image: ImageRows) -> None:
        """Append an image's rows to a sequence; rows that attend in both directions must fit into one run.

        Raises as `run` does, before anything is changed or with the rows removed again.
        """
        self._check_sequence(sequence)
        stored, count = self._book.length(sequence), len(image.ids)
        width, shape = int(self._lib.llama_model_n_embd_inp(self._model)), image.embeddings.shape
        if shape != (count, width) or not count or (image.sees_all and count > self.info.max_rows):
            raise ValueError(f"embeddings of shape {shape} are not rows of {width}, at most {self.info.max_rows}")
        if stored + count > self._max_context:
            raise ValueError(f"sequence {sequence} would grow beyond the model's {self._max_context} positions")
        check_room(count, self._book)
        self._book.append(sequence, count)
        try:
            self._decoder.append_image(sequence, image, self._positions.at(sequence, stored), self._chosen)
        except LlamaCppError:
            self._take_back({sequence: stored})
            raise
        self._positions.append(sequence, stored, image)

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        """Return the keys and values of positions start..stop-1."""
        self._check_cut(sequence, stop)
        if not 0 <= start < stop or (start and not self._can_truncate):
            raise ValueError(f"cannot export positions {start}..{stop} of sequence {sequence}")
        first, end = self._positions.at(sequence, start), self._positions.at(sequence, stop)
        return self._sequences.save(sequence, first, end, whole=stop == self._book.length(sequence))

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        """Append what export_kv returned for the same positions; start must equal the sequence's length.

        Raises ValueError for data of other positions, another size, model or KV type, and LlamaCppMemoryError if cells
        run out; the sequence is then unchanged.
        """
        self._check_sequence(sequence)
        if start != self._book.length(sequence) or stop <= start or (start and not self._can_truncate):
            raise ValueError(f"cannot import positions {start}..{stop} into sequence {sequence}")
        check_room(stop - start, self._book)
        first = self._positions.at(sequence, start)
        try:
            self._sequences.restore(data, sequence, first, first + stop - start)
        except ValueError:
            self._forget(sequence, start)
            raise
        self._book.append(sequence, stop - start)

    def close(self) -> None:
        """Free the context, the projector and the model. Idempotent."""
        if self.projector is not None:
            self.projector.close()
        if self._open_context is not None:
            self._lib.llama_free(self._open_context)
            self._open_context = None
        if self._model is not None:
            self._lib.llama_model_free(self._model)
            self._model = None

    @property
    def _context(self) -> Any:
        if self._open_context is None:
            raise ValueError("this runner is closed")
        return self._open_context

    def _kv_layout(self) -> str:
        """KV types, and the layout versions of llama.cpp and of this runner."""
        options = self._options
        types = f"{options.type_k}/{options.type_v}/flash={options.flash_attention}"
        return f"llama.cpp/{self._lib.LLAMA_STATE_SEQ_VERSION}.{_LAYOUT}/{types}"

    def _new_handle(self) -> int:
        _ = self._context  # raises if the runner is closed
        for sequence in range(self.info.max_sequences):
            if sequence not in self._book:
                return sequence
        raise LlamaCppError(f"all {self.info.max_sequences} sequences are in use; free one or raise max_sequences.")

    def _forget(self, sequence: int, start: int) -> bool:
        """Remove rows from `start` on, or all if it cannot be truncated there; return whether earlier rows are kept."""
        first = self._positions.at(sequence, start)
        if start and self._sequences.remove(sequence, first):
            return True
        self._sequences.remove(sequence, -1)
        return start == 0

    def _take_back(self, lengths: dict[int, int]) -> None:
        """Truncate sequences to their lengths before a failed computation."""
        for sequence, length in lengths.items():
            kept = length if self._forget(sequence, length) else 0
            self._book.truncate(sequence, kept)

    def _check_sequence(self, sequence: int) -> None:
        _ = self._context
        if sequence not in self._book:
            raise ValueError(f"there is no sequence {sequence}")

    def _check_cut(self, sequence: int, length: int) -> None:
        self._check_sequence(sequence)
        stored = self._book.length(sequence)
        if not 0 <= length <= stored:
            raise ValueError(f"sequence {sequence} has {stored} positions, not {length}")
        if length not in (0, stored) and not self._can_truncate:
            raise ValueError(
                f"this model's state cannot be truncated: keep {stored} positions of sequence {sequence}, or none"
            )


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


def open_planned(
    model: ModelFile, request: PlanRequest, progress: LoadProgress | None = None, main_memory: int | None = None
) -> tuple[LlamaCppRunner, Plan]:
    """Return a runner on this machine's devices and the plan that it follows.

    If a GPU runs out of memory, less is planned for it, a warning is logged, and the plan's notes say so; after four
    attempts, or if nothing is on a GPU, the error is raised. progress is called on this thread; an exception in it ends
    the load. main_memory: bytes to plan with; None means what is available. Raises LlamaCppError, its subclasses, and
    what plan() raises.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        room = available_memory() if main_memory is None else main_memory
        chosen = plan(model, gpus(), room, replace(request, dry_run=True))
        try:
            runner = LlamaCppRunner(model, chosen.options, progress)
        except LlamaCppMemoryError as error:
            if attempt == _ATTEMPTS or not chosen.device_bytes:
                raise
            logger.warning("%s\nTrying again with less on the GPU.", error)
            request = replace(request, gpu_layers=None, reserve_bytes=request.reserve_bytes + _STEP)
            continue
        if attempt == 1:
            return runner, chosen
        note = f"a GPU had less memory than it reported, so less was planned for it (attempt {attempt})"
        return runner, replace(chosen, notes=(*chosen.notes, note))
    raise AssertionError("the loop returns or raises")
