"""The arrays that llama_decode reads: those of tokens allocated once and filled without a Python loop over rows."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_offload.library import llama


class Batch:
    """A llama_batch of up to `rows` rows, each of one sequence."""

    def __init__(self, rows: int) -> None:
        self._token = np.zeros(rows, dtype=np.int32)
        self._position = np.zeros(rows, dtype=np.int32)
        self._sequence = np.zeros(rows, dtype=np.int32)
        self._wanted = np.zeros(rows, dtype=np.int8)
        self._ones = np.ones(rows, dtype=np.int32)
        # llama_batch.seq_id is an array of pointers; each points at its row's entry in _sequence, for good.
        base, step = self._sequence.ctypes.data, self._sequence.itemsize
        self._sequence_pointers = np.arange(rows, dtype=np.uintp) * np.uintp(step) + np.uintp(base)
        self.struct: Any = llama().llama_batch(
            n_tokens=0,
            token=_pointer(self._token, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._position, ctypes.c_int32),
            n_seq_id=_pointer(self._ones, ctypes.c_int32),
            seq_id=_pointer(self._sequence_pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        sequences: NDArray[np.int64],
        wanted: NDArray[np.int64],
    ) -> None:
        """Set the rows. wanted: indices of the rows whose logits are asked for."""
        count = len(tokens)
        self._token[:count] = tokens
        self._position[:count] = positions
        self._sequence[:count] = sequences
        self._wanted[:count] = 0
        self._wanted[wanted] = 1
        self.struct.n_tokens = count


class EmbeddingBatch:
    """A llama_batch of rows of embeddings, which stand for no tokens, of one sequence. No logits are asked for."""

    def __init__(self, embeddings: NDArray[np.float32], positions: NDArray[np.int32], sequence: int) -> None:
        """embeddings: float32[rows, width], which are kept alive as long as this.

        positions: one a row, or one a row for each dimension that the model counts in, dimension after dimension.
        """
        count = len(embeddings)
        self._embeddings = np.ascontiguousarray(embeddings)
        self._position = np.ascontiguousarray(positions)
        self._ones = np.ones(count, dtype=np.int32)
        self._sequence = np.array([sequence], dtype=np.int32)
        self._sequence_pointers = np.full(count, self._sequence.ctypes.data, dtype=np.uintp)
        self._wanted = np.zeros(count, dtype=np.int8)
        self.struct: Any = llama().llama_batch(
            n_tokens=count,
            token=None,
            embd=_pointer(self._embeddings, ctypes.c_float),
            pos=_pointer(self._position, ctypes.c_int32),
            n_seq_id=_pointer(self._ones, ctypes.c_int32),
            seq_id=_pointer(self._sequence_pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
