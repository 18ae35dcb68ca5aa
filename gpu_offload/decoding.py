"""Turns rows into calls of llama_decode: one per set of adapters, split so that the output buffer holds each result."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_io.image_rows import ImageRows
from gguf_io.runner_info import AdapterSet
from gpu_offload.adapters import Adapters
from gpu_offload.cells import StoredCells
from gpu_offload.errors import LlamaCppError
from gpu_offload.library import complaints, llama
from gpu_offload.loading import output_rows
from gpu_offload.options import LlamaOptions
from gpu_offload.sequences import Sequences


class Batch:
    """A llama_batch of up to `rows` rows, each of one sequence, in arrays that are allocated once.

    positions: numbers per row position; more than one for images of models with M-RoPE.
    """

    def __init__(self, rows: int, embeddings: NDArray[np.float32] | None = None, positions: int = 1) -> None:
        """embeddings: float32[rows, width], used instead of tokens."""
        self._token = np.zeros(rows, dtype=np.int32)
        self._embeddings = None if embeddings is None else np.ascontiguousarray(embeddings)
        self._position = np.zeros(rows * positions, dtype=np.int32)
        self._sequence = np.zeros(rows, dtype=np.int32)
        self._wanted = np.zeros(rows, dtype=np.int8)
        self._ones = np.ones(rows, dtype=np.int32)
        # llama_batch.seq_id is an array of pointers to the rows' entries in _sequence.
        base, step = self._sequence.ctypes.data, self._sequence.itemsize
        self._sequence_pointers = np.arange(rows, dtype=np.uintp) * np.uintp(step) + np.uintp(base)
        self.struct: Any = llama().llama_batch(
            n_tokens=0,
            token=_pointer(self._token, ctypes.c_int32) if self._embeddings is None else None,
            embd=None if self._embeddings is None else _pointer(self._embeddings, ctypes.c_float),
            pos=_pointer(self._position, ctypes.c_int32),
            n_seq_id=_pointer(self._ones, ctypes.c_int32),
            seq_id=_pointer(self._sequence_pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(
        self,
        tokens: NDArray[np.int64] | int,
        positions: NDArray[np.int64] | NDArray[np.int32],
        sequences: NDArray[np.int64] | int,
        wanted: NDArray[np.int64],
        count: int,
    ) -> None:
        """Set `count` rows. wanted: indices of the rows whose logits are requested."""
        self._token[:count] = tokens
        self._position[: len(positions)] = positions
        self._sequence[:count] = sequences
        self._wanted[:count] = 0
        self._wanted[wanted] = 1
        self.struct.n_tokens = count

    def set_tokens(self, tokens: NDArray[np.int64] | Sequence[int]) -> None:
        """Set the tokens of all rows."""
        self._token[: len(tokens)] = tokens


class Decoder:
    """Computes rows, checked before by cells.check_rows, on one context."""

    def __init__(
        self, context: Any, sequences: Sequences, options: LlamaOptions, vocab_size: int, adapters: Adapters
    ) -> None:
        self._lib = llama()
        self._context = context
        self._sequences = sequences
        # Two, so that one can be filled while llama.cpp may still read the other.
        self._batch, self._other = Batch(options.batch_rows), Batch(options.batch_rows)
        self._max_rows = options.batch_rows
        self._output_rows = output_rows(options)
        self._vocab_size = vocab_size
        self._adapters = adapters
        self._place, self._found = (0, 0), np.empty((0, vocab_size), dtype=np.float32)

    def prepare(
        self,
        positions: Sequence[int],
        sequences: Sequence[int],
        outputs: Sequence[int],
        alive: Mapping[int, StoredCells],
    ) -> Callable[[Sequence[int]], Callable[[], NDArray[np.float32]]]:
        """Lay out rows. The result takes their tokens, begins to compute, and returns what waits for the logits.

        outputs: the rows whose logits are requested. The result raises LlamaCppError.
        """
        places, wanted = np.array([positions, sequences], dtype=np.int64), np.array(outputs, dtype=np.int64)
        if not self._adapters and len(wanted) <= self._output_rows:
            return partial(self._start, self._laid_out(places, wanted), places, len(wanted))

        def compute(tokens: Sequence[int]) -> Callable[[], NDArray[np.float32]]:
            rows = np.vstack([np.array(tokens, dtype=np.int64), places])
            found = self._by_adapters(rows, wanted, alive) if self._adapters else self._decode(rows, wanted)
            return lambda: found

        return compute

    def _by_adapters(
        self, rows: NDArray[np.int64], outputs: NDArray[np.int64], alive: Mapping[int, StoredCells]
    ) -> NDArray[np.float32]:
        """Compute int64[3, count] rows (tokens, positions, sequences), those of each set of adapters apart.

        llama.cpp applies one set to a whole batch.
        """
        members: dict[AdapterSet, list[int]] = {}
        for index, sequence in enumerate(rows[2].tolist()):
            members.setdefault(alive[sequence].adapters, []).append(index)
        found = np.empty((len(outputs), self._vocab_size), dtype=np.float32)
        for adapters, indices in members.items():
            self._adapters.apply(self._context, adapters)
            wanted = np.flatnonzero(np.isin(indices, outputs))
            found[np.isin(outputs, indices)] = self._decode(rows[:, indices], wanted)
        return found

    def append_image(self, sequence: int, image: ImageRows, first: int, adapters: AdapterSet) -> None:
        """Compute an image's rows from position `first` on, in batches of `max_rows`. Raises LlamaCppError."""
        if self._adapters:
            self._adapters.apply(self._context, adapters)
        self._lib.llama_set_causal_attn(self._context, not image.sees_all)
        try:
            for at in range(0, len(image.ids), self._max_rows):
                stop = min(at + self._max_rows, len(image.ids))
                positions = image.positions(first, at, stop)
                piece = Batch(stop - at, image.embeddings[at:stop], len(positions) // (stop - at))
                piece.fill(0, positions, sequence, np.empty(0, np.int64), stop - at)
                status = self._lib.llama_decode(self._context, piece.struct)
                if status:
                    raise LlamaCppError(f"llama_decode failed on an image with status {status}:\n{complaints()}")
                self._lib.llama_synchronize(self._context)  # llama.cpp reads the rows until then
                self._sequences.computed(sequence, first)
        finally:
            self._lib.llama_set_causal_attn(self._context, True)

    def _decode(self, rows: NDArray[np.int64], outputs: NDArray[np.int64]) -> NDArray[np.float32]:
        """Compute the rows, in as many calls as the output buffer requires: nearly always one."""
        if len(outputs) <= self._output_rows:
            return self._decode_once(rows, outputs)
        count = rows.shape[1]
        last_outputs = outputs[self._output_rows - 1 :: self._output_rows]
        cuts = [0, *(int(row) + 1 for row in last_outputs if row + 1 < count), count]
        pieces = []
        for first, end in pairwise(cuts):
            inside = outputs[(outputs >= first) & (outputs < end)] - first
            pieces.append(self._decode_once(rows[:, first:end], inside).copy())
        return np.concatenate(pieces)

    def _decode_once(self, rows: NDArray[np.int64], outputs: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._start(self._laid_out(rows[1:], outputs), rows[1:], len(outputs), rows[0])()

    def _laid_out(self, places: NDArray[np.int64], outputs: NDArray[np.int64]) -> Batch:
        """A batch of rows that lack their tokens. places: int64[2, count]: positions, sequences."""
        self._batch, self._other = self._other, self._batch
        self._batch.fill(0, places[0], places[1], outputs, places.shape[1])
        return self._batch

    def _start(
        self, batch: Batch, places: NDArray[np.int64], wanted: int, tokens: NDArray[np.int64] | Sequence[int]
    ) -> Callable[[], NDArray[np.float32]]:
        """One llama_decode, which returns before GPUs are ready; the result waits for the logits."""
        batch.set_tokens(tokens)
        status = self._lib.llama_decode(self._context, batch.struct)
        if status:
            raise LlamaCppError(f"llama_decode failed with status {status}:\n{complaints()}")
        if self._sequences.shadowed:
            begins = np.flatnonzero(np.diff(places[1], prepend=-1))
            for position, sequence in places[:, begins].T.tolist():
                self._sequences.computed(sequence, position)
        return partial(self._logits, wanted)

    def _logits(self, count: int) -> NDArray[np.float32]:
        """Wait; return the logits of the last llama_decode as a view of llama.cpp's buffer."""
        if not count:
            self._lib.llama_synchronize(self._context)
            return np.empty((0, self._vocab_size), dtype=np.float32)
        logits = self._lib.llama_get_logits(self._context)
        place = ctypes.addressof(logits.contents), count
        if place != self._place:  # making an array takes longer than all else here
            self._place, self._found = place, np.ctypeslib.as_array(logits, shape=(count, self._vocab_size))
        return self._found


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
