"""Rows into calls of llama_decode: one for each set of adapters, and no more outputs a call than there is room for."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_offload.adapters import Adapters, AdapterSet
from gpu_offload.batch import Batch, EmbeddingBatch
from gpu_offload.errors import LlamaCppError
from gpu_offload.image_rows import ImageRows
from gpu_offload.library import complaints, llama
from gpu_offload.loading import output_rows
from gpu_offload.options import LlamaOptions
from gpu_offload.sequences import Sequences


class Decoder:
    """Computes rows that are known to be sound on one context. chosen: the sequences that have adapters, and which."""

    def __init__(
        self, context: Any, sequences: Sequences, options: LlamaOptions, vocab_size: int, adapters: Adapters
    ) -> None:
        self._lib = llama()
        self._context = context
        self._sequences = sequences
        self._batch = Batch(options.batch_rows)
        self._max_rows = options.batch_rows
        self._output_rows = output_rows(options)
        self._vocab_size = vocab_size
        self._adapters = adapters

    def run(
        self, rows: NDArray[np.int64], outputs: NDArray[np.int64], chosen: Mapping[int, AdapterSet]
    ) -> NDArray[np.float32]:
        """Compute rows of tokens, positions and sequences, in one pass for each set of adapters among them.

        llama.cpp has one set for all of a batch. Raises LlamaCppError.
        """
        if not self._adapters:
            return self._decode(rows, outputs)
        members: dict[AdapterSet, list[int]] = {}
        for index, sequence in enumerate(rows[2].tolist()):
            members.setdefault(chosen.get(sequence, ()), []).append(index)
        found = np.empty((len(outputs), self._vocab_size), dtype=np.float32)
        for adapters, indices in members.items():
            self._adapters.apply(self._context, adapters)
            wanted = np.flatnonzero(np.isin(indices, outputs))
            found[np.isin(outputs, indices)] = self._decode(rows[:, indices], wanted)
        return found

    def append_image(self, sequence: int, image: ImageRows, first: int, chosen: Mapping[int, AdapterSet]) -> None:
        """Compute an image's rows from position `first` on, as many at once as a run takes. Raises LlamaCppError."""
        if self._adapters:
            self._adapters.apply(self._context, chosen.get(sequence, ()))
        self._lib.llama_set_causal_attn(self._context, not image.sees_all)
        try:
            for at in range(0, len(image.ids), self._max_rows):
                stop = min(at + self._max_rows, len(image.ids))
                piece = EmbeddingBatch(image.embeddings[at:stop], image.positions(first, at, stop), sequence)
                status = self._lib.llama_decode(self._context, piece.struct)
                if status:
                    raise LlamaCppError(f"llama_decode failed on an image with status {status}:\n{complaints()}")
                self._lib.llama_synchronize(self._context)  # which reads the rows until then
                self._sequences.computed(sequence, first)
        finally:
            self._lib.llama_set_causal_attn(self._context, True)

    def _decode(self, rows: NDArray[np.int64], outputs: NDArray[np.int64]) -> NDArray[np.float32]:
        """Compute the rows, in as many calls as the output buffer demands: nearly always one."""
        if len(outputs) <= self._output_rows:
            return self._decode_piece(rows, outputs)
        count = rows.shape[1]
        last_outputs = outputs[self._output_rows - 1 :: self._output_rows]
        cuts = [0, *(int(row) + 1 for row in last_outputs if row + 1 < count), count]
        pieces = []
        for first, end in pairwise(cuts):
            inside = outputs[(outputs >= first) & (outputs < end)] - first
            pieces.append(self._decode_piece(rows[:, first:end], inside).copy())
        return np.concatenate(pieces)

    def _decode_piece(self, rows: NDArray[np.int64], outputs: NDArray[np.int64]) -> NDArray[np.float32]:
        """One llama_decode; the result is a view of llama.cpp's buffer."""
        self._batch.fill(rows[0], rows[1], rows[2], outputs)
        status = self._lib.llama_decode(self._context, self._batch.struct)
        if status:
            raise LlamaCppError(f"llama_decode failed with status {status}:\n{complaints()}")
        if self._sequences.shadowed:
            begins = np.flatnonzero(np.diff(rows[2], prepend=-1))
            for position, sequence in rows[1:, begins].T.tolist():
                self._sequences.computed(sequence, position)
        if not len(outputs):
            self._lib.llama_synchronize(self._context)
            return np.empty((0, self._vocab_size), dtype=np.float32)
        logits = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(len(outputs), self._vocab_size))
