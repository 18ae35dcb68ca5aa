"""Pictures encoded by llama.cpp's multimodal library, from their pixels."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle import llama_oracle

Piece = tuple[int, ...] | np.ndarray
"""Token ids, or rows of embeddings."""


class LlamaVision:
    """A projector that llama.cpp has loaded for a language model."""

    def __init__(self, projector: Path, model: Path, least: int = 0, most: int = 0, threads: int = 1) -> None:
        """least, most: tokens of a picture, 0 for the projector's own limits."""
        from llama_cpp import mtmd_cpp

        self._mtmd = mtmd_cpp
        params = mtmd_cpp.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.warmup = False, threads, False
        params.image_min_tokens, params.image_max_tokens = least or -1, most or -1
        handle = llama_oracle.load(model)
        self.width = int(llama_oracle.api().llama_model_n_embd_inp(handle))
        self._context = mtmd_cpp.mtmd_init_from_file(str(projector).encode(), handle, params)
        assert self._context, f"llama.cpp cannot load {projector}:\n{llama_oracle.log()[-2000:]}"

    def close(self) -> None:
        self._mtmd.mtmd_free(self._context)

    def pieces(self, pixels: np.ndarray) -> list[Piece]:
        """What llama.cpp makes of a picture, uint8[height, width, 3], or a sound, float32[samples]."""
        mtmd = self._mtmd
        with self._chunks(pixels) as chunks:
            count = mtmd.mtmd_input_chunks_size(chunks)
            return [self._piece(mtmd.mtmd_input_chunks_get(chunks, number)) for number in range(count)]

    def rows(self, pixels: np.ndarray) -> list[np.ndarray]:
        """Only the rows of embeddings, one array for each run."""
        return [piece for piece in self.pieces(pixels) if isinstance(piece, np.ndarray)]

    def _piece(self, chunk: Any) -> Piece:
        mtmd = self._mtmd
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            length = ctypes.c_size_t()
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(length))
            return tuple(tokens[: length.value])
        assert mtmd.mtmd_encode_chunk(self._context, chunk) == 0
        shape = (int(mtmd.mtmd_input_chunk_get_n_tokens(chunk)), self.width)
        return np.array(np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._context), shape=shape))

    @contextlib.contextmanager
    def _chunks(self, pixels: np.ndarray) -> Iterator[Any]:
        mtmd = self._mtmd
        marker = mtmd.mtmd_default_marker()
        data = np.ascontiguousarray(pixels)
        kind = ctypes.c_uint8 if data.ndim == 3 else ctypes.c_float
        buffer = data.ctypes.data_as(ctypes.POINTER(kind * data.size)).contents
        if data.ndim == 3:
            bitmap = mtmd.mtmd_bitmap_init(pixels.shape[1], pixels.shape[0], buffer)
        else:
            bitmap = mtmd.mtmd_bitmap_init_from_audio(data.size, buffer)
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            text = mtmd.mtmd_input_text(marker, len(marker), False, True)
            code = mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), (ctypes.c_void_p * 1)(bitmap), 1)
            assert code == 0
            yield chunks
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)
