"""llama.cpp as the peer of a benchmark: computes prompts and tokens directly through its C interface.

Set LOCALLLM_PEER to a folder with another build of llama-cpp-python to measure that one, e.g. one without AMX kernels,
which end the process on some processors: there the default build must not repack weights.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if "LOCALLLM_PEER" in os.environ:
    sys.path.insert(0, os.environ["LOCALLLM_PEER"])


class LlamaPeer:
    """One sequence of a model on llama.cpp."""

    def __init__(
        self,
        path: Path,
        threads: int,
        context: int,
        *,
        flash_attention: bool,
        sequences: int = 1,
        kv_types: tuple[str, str] = ("f16", "f16"),
        gpu_layers: int = 0,
    ) -> None:
        from gpu_offload.library import llama
        from gpu_offload.loading import model_params
        from gpu_offload.options import LlamaOptions

        self._llama: Any = llama()
        params = model_params(LlamaOptions(gpu_layers=gpu_layers, split_mode="none"))
        self._model = self._llama.llama_model_load_from_file(str(path).encode(), params)
        settings = self._llama.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, 512, 512
        # A single sequence shares its cells with a second one, through which `repeat` copies.
        settings.n_seq_max, settings.kv_unified = max(2, sequences), sequences == 1
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = int(flash_attention)
        settings.type_k, settings.type_v = (getattr(self._llama, f"GGML_TYPE_{kind.upper()}") for kind in kv_types)
        self._context = self._llama.llama_init_from_model(self._model, settings)
        vocabulary = self._llama.llama_model_get_vocab(self._model)
        self._vocabulary = int(self._llama.llama_vocab_n_tokens(vocabulary))
        # States of recurrent layers cannot be truncated: a copy of the whole sequence is restored instead.
        self._recurs = bool(
            self._llama.llama_model_is_recurrent(self._model) or self._llama.llama_model_is_hybrid(self._model)
        )
        self._kept, self._kept_length = b"", 0

    def append(self, tokens: Sequence[int]) -> None:
        """Compute tokens and append them, 512 at a time, with logits of the last."""
        for first in range(0, len(tokens), 512):
            piece = tokens[first : first + 512]
            array = (ctypes.c_int32 * len(piece))(*piece)
            if self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(array, len(piece))):
                raise RuntimeError("llama_decode failed")
        if tokens:
            self._llama.llama_get_logits_ith(self._context, -1)[0]

    def logits(self) -> NDArray[np.float32]:
        """The logits of the last token: float32[vocabulary], valid until the next call."""
        row = self._llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(row, shape=(self._vocabulary,))

    def clear(self) -> None:
        """Forget all sequences."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)

    def cut(self, length: int) -> None:
        """Drop the first sequence's tokens from `length` on.

        Raises ValueError for a recurrent model if length is neither 0 nor what `repeat` filled the sequence up to.
        """
        if length not in (0, self._kept_length) and self._recurs:
            raise ValueError(f"states of {self._kept_length} tokens are kept, not of {length}")
        first = 0 if self._recurs else length
        self._llama.llama_memory_seq_rm(self._llama.llama_get_memory(self._context), 0, first, -1)
        if length and self._recurs:
            state = (ctypes.c_uint8 * len(self._kept)).from_buffer_copy(self._kept)
            if not self._llama.llama_state_seq_set_data(self._context, state, len(state), 0):
                raise RuntimeError("llama.cpp refused its own sequence's state")

    def repeat(self, length: int) -> None:
        """Fill the single sequence up to `length` tokens by repeating its keys and values.

        llama.cpp rotates the keys to their positions on the next decode. States of recurrent layers are computed, and
        kept for `cut`.
        """
        memory = self._llama.llama_get_memory(self._context)
        have = int(self._llama.llama_memory_seq_pos_max(memory, 0)) + 1
        if self._recurs:
            self.append([100 + i % 1000 for i in range(have, length)])
            have = length
        size = self._llama.llama_state_seq_get_size(self._context, 0)
        state = (ctypes.c_uint8 * size)()
        self._llama.llama_state_seq_get_data(self._context, state, size, 0)
        if self._recurs:
            self._kept, self._kept_length = bytes(state), length
        for start in range(have, length, have):
            if not self._llama.llama_state_seq_set_data(self._context, state, size, 1):
                raise RuntimeError("llama.cpp refused its own sequence's state")
            self._llama.llama_memory_seq_rm(memory, 1, min(have, length - start), -1)
            self._llama.llama_memory_seq_add(memory, 1, 0, -1, start)
            self._llama.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            self._llama.llama_memory_seq_rm(memory, 1, -1, -1)

    def keep(self, length: int) -> None:
        """Leave a second sequence of `length` tokens in the cells, and the first one empty."""
        memory = self._llama.llama_get_memory(self._context)
        self.append(range(100, 100 + min(length, 512)))
        self.repeat(length)
        self._llama.llama_memory_seq_cp(memory, 0, 1, -1, -1)
        self.cut(0)

    def close(self) -> None:
        """Free model and context."""
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)
