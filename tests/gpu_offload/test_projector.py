"""Images on llama.cpp's runner, compared with llama.cpp's own processing of text and images."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gguf_io.errors import ModelFileError, PictureError
from gguf_io.image_rows import ImageRows
from gpu_offload import loading
from gpu_offload.errors import LlamaCppError, LlamaCppMemoryError
from gpu_offload.runner import LlamaCppRunner
from tests.gpu_offload.projector_runs import (
    append,
    batch_difference,
    close_sequences,
    opened,
    oracle_logits,
    see,
    whole_prompt,
)
from tests.oracle import llama_oracle
from tests.oracle.vision_oracle import LlamaVision
from tests.picture_files import png
from tests.projector_files import write_projector

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch):
    monkeypatch.setattr(loading, "can_repack", lambda: False)


@pytest.fixture(scope="module")
def path(data_dir) -> Path:
    return data_dir / "models/gguf/stories260K-F32.gguf"


@pytest.fixture(scope="module", params=["mlp", "gemma3"])
def projector(request, tmp_path_factory) -> Path:
    return write_projector(tmp_path_factory.mktemp("projectors") / f"mmproj-{request.param}.gguf", request.param)


@pytest.fixture(scope="module")
def loaded(path, projector) -> Iterator[LlamaCppRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "can_repack", lambda: False)
        made = opened(path, projector)
    yield made
    made.close()


@pytest.fixture
def runner(loaded) -> Iterator[LlamaCppRunner]:
    yield loaded
    close_sequences(loaded)


def test_logits_after_an_image_are_llama_cpps(path, projector, runner):
    image = png(3)
    pieces = see(runner, image)
    rows = [piece for piece in pieces if isinstance(piece, ImageRows)]
    is_gemma = "gemma3" in projector.name
    assert [(len(piece.ids), piece.sees_all) for piece in rows] == [(16, is_gemma)]
    assert len(pieces) == (3 if is_gemma else 1)  # Gemma 3's images are enclosed in marks

    sequence = runner.create_sequence()
    found = append(runner, sequence, whole_prompt(path, pieces), wanted=True)[-1]
    expected = oracle_logits(path, projector, image)
    tolerance = 2 * batch_difference(runner, whole_prompt(path, pieces)) + 1e-3
    np.testing.assert_allclose(found, expected, atol=tolerance)
    assert np.abs(oracle_logits(path, projector, png(4)) - expected).max() > 0.05

    # The keys and values of an image are shared like any others, and exported whole.
    prefix = len(whole_prompt(path, pieces)[0]) + sum(len(getattr(piece, "ids", piece)) for piece in pieces)
    fork = runner.fork_sequence(sequence, prefix)
    again = append(runner, fork, whole_prompt(path, pieces)[-1:], wanted=True)[-1]
    np.testing.assert_allclose(again, expected, atol=tolerance)


def test_an_image_has_unique_ids(runner):
    first, second = see(runner, png(1)), see(runner, png(2))
    ids = [
        {token for piece in pieces if isinstance(piece, ImageRows) for token in piece.ids} for pieces in (first, second)
    ]
    assert not ids[0] & ids[1]
    assert all(2**62 <= token < 2**63 for token in ids[0] | ids[1])


def zeros(count: int, sees_all: bool) -> ImageRows:
    return ImageRows(tuple(range(2**62, 2**62 + count)), np.zeros((count, 64), np.float32), sees_all)


def test_rows_that_cannot_be_appended_change_nothing(path, projector, runner):
    (rows,) = [piece for piece in see(runner, png(1)) if isinstance(piece, ImageRows)]
    sequence = runner.create_sequence()
    for embeddings in (rows.embeddings[:, 1:], rows.embeddings[:0]):
        with pytest.raises(ValueError, match="rows of 64"):
            runner.append_image(
                sequence, ImageRows(rows.ids[: len(embeddings)], embeddings, False), runner.sequence_length(sequence)
            )
    with pytest.raises(ValueError, match="at most 64"):
        runner.append_image(sequence, zeros(65, True), runner.sequence_length(sequence))
    with pytest.raises(ValueError, match="512 positions"):
        runner.append_image(sequence, zeros(513, False), runner.sequence_length(sequence))
    other = runner.create_sequence()
    runner.append_image(other, zeros(300, False), runner.sequence_length(other))
    with pytest.raises(LlamaCppMemoryError, match="do not fit"):
        runner.append_image(sequence, zeros(300, False), runner.sequence_length(sequence))
    assert runner.sequence_length(sequence) == 0


def test_projectors_of_other_models_are_refused(path, tmp_path):
    wide = write_projector(tmp_path / "wide.gguf", text=96)
    other = write_projector(tmp_path / "other.gguf", keys={"general.architecture": "llama"})
    for file, problem in [(wide, "mismatch"), (other, "not a projector"), (path, "not a projector")]:
        with pytest.raises(LlamaCppError, match=problem):
            opened(path, file)
    with pytest.raises(ModelFileError):
        opened(path, tmp_path / "missing.gguf")


def test_a_sound_is_heard_as_llama_cpp_hears_it(path, tmp_path):
    projector = write_projector(tmp_path / "mmproj.gguf", "gemma4uv", sound="gemma4ua")
    samples = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    runner, llama = opened(path, projector), LlamaVision(projector, path)
    try:
        ear = runner.projector
        begin, rows, end = ear.hear(samples, bytes(32))
        before, expected, after = llama.pieces(samples)
        assert (ear.sound_rate, ear.sound_tokens(3000)) == (16_000, 5 + len(before) + len(after))
        assert (begin, end) == (before, after) and not rows.sees_all
        np.testing.assert_allclose(rows.embeddings, expected, rtol=1e-5, atol=1e-6)
        assert len(ear.hear(samples[:1], bytes(32))[1].ids) == 3  # a single sample would end the process
    finally:
        llama.close()
        runner.close()


def test_a_projector_of_pictures_hears_nothing(runner):
    with pytest.raises(PictureError, match="hears no sound"):
        runner.projector.sound_rate  # noqa: B018
