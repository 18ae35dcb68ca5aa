"""Images on llama.cpp's runner, held to llama.cpp's own way through text and images."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gguf_io import load_tokenizer
from gguf_io.errors import ModelFileError
from gguf_io.model_file import open_model
from gpu_offload import loading
from gpu_offload.errors import LlamaCppError, LlamaCppMemoryError, PictureError
from gpu_offload.options import LlamaOptions
from gpu_offload.projector import ImagePieces, ImageRows
from gpu_offload.runner import LlamaCppRunner
from tests.gpu_offload.projector_files import PATCHES, png, write_projector
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

SAME = llama_oracle.Setup(threads=1, flash_attention=True)
BEFORE, AFTER = "Once upon a time", "there was a dog"


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch):
    monkeypatch.setattr(loading, "can_repack", lambda: False)


@pytest.fixture(scope="module")
def path(data_dir) -> Path:
    return data_dir / "models/gguf/stories260K-F32.gguf"


@pytest.fixture(scope="module", params=["mlp", "gemma3"])
def projector(request, tmp_path_factory) -> Path:
    return write_projector(tmp_path_factory.mktemp("projectors") / f"mmproj-{request.param}.gguf", request.param)


def opened(path: Path, projector: Path, **more) -> LlamaCppRunner:
    options = LlamaOptions(
        **{"context_tokens": 512, "max_sequences": 4, "threads": 1, "flash_attention": True, "batch_rows": 64} | more,
        gpu_layers=0,
        mmproj=projector,
    )
    with open_model(path) as model:
        return LlamaCppRunner(model, options)


@pytest.fixture(scope="module")
def runner(path, projector) -> Iterator[LlamaCppRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "can_repack", lambda: False)
        made = opened(path, projector)
    yield made
    made.close()


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


def append(runner: LlamaCppRunner, sequence: int, pieces: ImagePieces, wanted: bool = False) -> np.ndarray:
    """Append pieces one after the other; the logits of the last row."""
    logits = np.empty((0, 0))
    for piece in pieces:
        if isinstance(piece, ImageRows):
            runner.append_embeddings(sequence, piece.embeddings, piece.sees_all)
            continue
        start = runner.sequence_length(sequence)
        positions = range(start, start + len(piece))
        last = [len(piece) - 1] if wanted else []
        logits = runner.run(piece, positions, [sequence] * len(piece), last)
    return np.array(logits)


def whole_prompt(path: Path, pieces: ImagePieces) -> ImagePieces:
    with open_model(path) as model:
        tokenizer = load_tokenizer(model)
    return (tuple(tokenizer.encode(BEFORE)), *pieces, tuple(tokenizer.encode(AFTER, add_special=False)))


def test_logits_after_an_image_are_llama_cpps(path, projector, runner):
    image = png(3)
    pieces = runner.projector.see(image)
    rows = [piece for piece in pieces if isinstance(piece, ImageRows)]
    is_gemma = "gemma3" in projector.name
    assert [(len(piece.ids), piece.sees_all) for piece in rows] == [(PATCHES // 4 if is_gemma else PATCHES, is_gemma)]
    assert len(pieces) == (3 if is_gemma else 1)  # Gemma 3's images stand between marks

    sequence = runner.create_sequence()
    found = append(runner, sequence, whole_prompt(path, pieces), wanted=True)[-1]
    expected = oracle_logits(path, projector, image)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert np.abs(oracle_logits(path, projector, png(4)) - expected).max() > 0.05

    # The keys and values of an image are shared like any others, and exported whole.
    prefix = len(whole_prompt(path, pieces)[0]) + sum(len(getattr(piece, "ids", piece)) for piece in pieces)
    fork = runner.fork_sequence(sequence, prefix)
    again = append(runner, fork, whole_prompt(path, pieces)[-1:], wanted=True)[-1]
    np.testing.assert_allclose(again, expected, atol=2e-3)
    for one in (sequence, fork):
        runner.free_sequence(one)
    assert runner.pages_free() == runner.pages_total()


def test_an_image_has_its_own_ids_and_is_encoded_once(runner):
    first, second = runner.projector.see(png(1)), runner.projector.see(png(2))
    assert runner.projector.see(png(1)) is first
    ids = [
        {token for piece in pieces if isinstance(piece, ImageRows) for token in piece.ids} for pieces in (first, second)
    ]
    assert not ids[0] & ids[1]
    assert all(2**62 <= token < 2**63 for token in ids[0] | ids[1])


def test_rows_that_cannot_be_appended_change_nothing(path, projector, runner):
    (rows,) = [piece for piece in runner.projector.see(png(1)) if isinstance(piece, ImageRows)]
    sequence = runner.create_sequence()
    for embeddings, sees_all in [(rows.embeddings[:, 1:], False), (rows.embeddings[:0], False)]:
        with pytest.raises(ValueError, match="rows of 64"):
            runner.append_embeddings(sequence, embeddings, sees_all)
    with pytest.raises(ValueError, match="at most 64"):
        runner.append_embeddings(sequence, np.zeros((65, 64), np.float32), True)
    with pytest.raises(ValueError, match="512 positions"):
        runner.append_embeddings(sequence, np.zeros((513, 64), np.float32), False)
    other = runner.create_sequence()
    runner.append_embeddings(other, np.zeros((300, 64), np.float32), False)
    with pytest.raises(LlamaCppMemoryError, match="do not fit"):
        runner.append_embeddings(sequence, np.zeros((300, 64), np.float32), False)
    assert runner.sequence_length(sequence) == 0
    runner.free_sequence(sequence)
    runner.free_sequence(other)
    with pytest.raises(PictureError, match="neither PNG nor JPEG"):
        runner.projector.see(b"GIF89a")


def test_files_that_are_no_projector_of_this_model_are_refused(path, tmp_path):
    wide = write_projector(tmp_path / "wide.gguf", width=96)
    other = write_projector(tmp_path / "other.gguf", architecture="llama")
    for file, problem in [(wide, "mismatch"), (other, "no projector"), (path, "no projector")]:
        with pytest.raises(LlamaCppError, match=problem):
            opened(path, file)
    with pytest.raises(ModelFileError):
        opened(path, tmp_path / "missing.gguf")
