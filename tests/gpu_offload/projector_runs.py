"""Text, an image, text: computed by our runner, and by llama.cpp's own helper."""

import contextlib
import ctypes
import hashlib
from pathlib import Path

import numpy as np

from gguf_io import load_tokenizer
from gguf_io.image_rows import ImagePieces, ImageRows, SeenPieces
from gguf_io.model_file import open_model
from gguf_io.pictures import DEFAULT_BUDGET, decode
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from models.native_runner import NativeRunner
from tests.oracle import llama_oracle

SAME = llama_oracle.Setup(threads=1, flash_attention=True)
BEFORE, AFTER = "Once upon a time", "there was a dog"


def opened(path: Path, projector: Path, **more) -> LlamaCppRunner:
    options = LlamaOptions(
        **{"context_tokens": 512, "max_sequences": 4, "threads": 1, "batch_rows": 64} | more,
        gpu_layers=0,
        mmproj=projector,
    )
    with open_model(path) as model:
        return LlamaCppRunner(model, options)


def oracle_logits(path: Path, projector: Path, image: bytes) -> np.ndarray:
    """The last logits of mtmd_helper_eval_chunks on text, image, text."""
    from llama_cpp import mtmd_cpp as mtmd

    llama = llama_oracle.api()
    params = mtmd.mtmd_context_params_default()
    params.use_gpu, params.n_threads = False, 1
    seer = mtmd.mtmd_init_from_file(str(projector).encode(), llama_oracle.load(path), params)
    marker = mtmd.mtmd_default_marker()
    prompt = BEFORE.encode() + marker + AFTER.encode()
    bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(seer, (ctypes.c_uint8 * len(image))(*image), len(image), False)
    chunks = mtmd.mtmd_input_chunks_init()
    try:
        text = mtmd.mtmd_input_text(prompt, len(prompt), True, True)
        assert mtmd.mtmd_tokenize(seer, chunks, ctypes.byref(text), (ctypes.c_void_p * 1)(bitmap), 1) == 0
        with llama_oracle.context(path, 256, SAME) as handle:
            past = ctypes.c_int32(0)
            assert mtmd.mtmd_helper_eval_chunks(seer, handle, chunks, 0, 0, 64, True, ctypes.byref(past)) == 0
            logits = llama.llama_get_logits_ith(handle, -1)
            return np.array(np.ctypeslib.as_array(logits, (llama_oracle.vocab_size(path),)))
    finally:
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        mtmd.mtmd_free(seer)


def see(runner: LlamaCppRunner | NativeRunner, data: bytes) -> SeenPieces:
    """A picture file as the runner's projector makes it."""
    assert runner.projector is not None
    return runner.projector.see(decode(data), hashlib.sha256(data).digest(), DEFAULT_BUDGET).pieces


def append(
    runner: LlamaCppRunner | NativeRunner,
    sequence: int,
    pieces: ImagePieces,
    wanted: bool = False,
    position: int | None = None,
) -> np.ndarray:
    """Append pieces in order; returns the logits of the last row. position: of the first, None for the length."""
    logits = np.empty((0, 0))
    position = runner.sequence_length(sequence) if position is None else position
    for piece in pieces:
        if isinstance(piece, ImageRows):
            runner.append_image(sequence, piece, position)
            position += piece.length
            continue
        last = [len(piece) - 1] if wanted else []
        logits = runner.run(piece, range(position, position + len(piece)), [sequence] * len(piece), last)
        position += len(piece)
    return np.array(logits)


def positions_of(pieces: ImagePieces) -> int:
    """How many positions the pieces take."""
    return sum(piece.length if isinstance(piece, ImageRows) else len(piece) for piece in pieces)


def whole_prompt(path: Path, pieces: ImagePieces) -> ImagePieces:
    with open_model(path) as model:
        tokenizer = load_tokenizer(model)
    return (tuple(tokenizer.encode(BEFORE)), *pieces, tuple(tokenizer.encode(AFTER, add_special=False)))


def batch_difference(runner: LlamaCppRunner, prompt: ImagePieces) -> float:
    """How much llama.cpp's own logits differ between the last rows in one batch and the last row alone.

    Kernels round differently for other batch shapes, and each processor has its own kernels: 0.0002 to 0.004 seen.
    """
    sequence = runner.create_sequence()
    whole = append(runner, sequence, prompt, wanted=True)[-1]
    runner.truncate_sequence(sequence, runner.sequence_length(sequence) - 1)
    alone = append(runner, sequence, (prompt[-1][-1:],), True, positions_of(prompt) - 1)[-1]
    runner.free_sequence(sequence)
    return float(np.abs(whole - alone).max())


def close_sequences(runner: LlamaCppRunner) -> None:
    """Free what a test, even a failed one, has left in a shared runner."""
    for sequence in range(runner.info.max_sequences):
        with contextlib.suppress(ValueError):
            runner.free_sequence(sequence)
    assert runner.pages_free() == runner.info.pages_total
