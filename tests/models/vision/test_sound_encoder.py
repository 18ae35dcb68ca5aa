"""Gemma 4's sound encoder: rows and marks are llama.cpp's; what cannot be heard is refused."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_io import open_model
from gguf_io.errors import PictureError
from gguf_io.image_rows import ImageRows
from models.vision.encoder import open_encoder, vision_needs
from models.vision.projector import NativeProjector
from tests.models.vision.test_image_encoders import similarity
from tests.oracle import llama_oracle
from tests.oracle.vision_oracle import LlamaVision
from tests.projector_files import write_projector

Q = gguf.GGMLQuantizationType
CONTENT = bytes(32)


def noise(samples: int) -> np.ndarray:
    values = np.random.default_rng(samples).standard_normal(samples) * np.linspace(0.01, 0.3, samples)
    return values.astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("sound") / "projector.gguf", "gemma4uv", sound="gemma4ua")


def opened(path: Path, threads: int = 1, context: int = 4096) -> NativeProjector:
    with open_model(path) as file:
        return NativeProjector(file, threads, context=context)


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("weights", [Q.F32, Q.F16, Q.BF16, Q.Q8_0], ids=lambda each: each.name)
def test_rows_and_marks_are_llama_cpps(weights: Q, data_dir: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["mm.a.input_projection.weight"] *= 3

    path = write_projector(tmp_path / "p.gguf", "gemma4uv", sound="gemma4ua", weights=weights, changed=change)
    model = data_dir / "models/gguf/stories260K-F32.gguf"
    llama, projector = LlamaVision(path, model), opened(path)
    try:
        for samples in (2, 639, 640, 641, 16_000, 16_000 * 25):  # the last takes two passes
            begin, rows, end = projector.hear(noise(samples), CONTENT)
            before, expected, after = llama.pieces(noise(samples))
            assert isinstance(rows, ImageRows) and isinstance(expected, np.ndarray) and not rows.sees_all
            assert len(rows.ids) == len(expected) == projector.sound_tokens(samples) == -(-samples // 640)
            assert similarity(rows.embeddings, expected) > (0.9999 if weights in (Q.F32, Q.F16) else 0.999)
            marks = [tuple(llama_oracle.tokenize(model, str(mark), add_special=False)) for mark in (begin, end)]
            assert marks == [before, after]
    finally:
        llama.close()
        projector.close()


def test_a_sound_has_the_same_bits_on_any_number_of_threads(path: Path) -> None:
    found = []
    for threads in (1, 2):
        projector = opened(path, threads)
        _, rows, _ = projector.hear(noise(30_000), CONTENT)
        assert isinstance(rows, ImageRows)
        found.append(rows.embeddings)
        projector.close()
    np.testing.assert_array_equal(*found)


def test_sounds_that_are_too_long_are_refused_before_they_are_encoded(path: Path) -> None:
    projector = opened(path)
    assert (projector.sound_rate, projector.sound_tokens(30 * 16_000)) == (16_000, 750)
    with pytest.raises(PictureError, match=r"lasts 31\.5 s; this model hears at most 30 s"):
        projector.sound_tokens(int(31.5 * 16_000))
    projector.close()
    projector = opened(path, context=100)
    with pytest.raises(PictureError, match="The sound takes 125 tokens, more than the context of 100"):
        projector.hear(noise(5 * 16_000), CONTENT)
    projector.close()


def test_other_projectors_hear_nothing_and_say_what_may(tmp_path: Path) -> None:
    deaf = opened(write_projector(tmp_path / "deaf.gguf", "gemma4uv"))
    with pytest.raises(PictureError, match="hears no sound"):
        deaf.sound_rate  # noqa: B018
    deaf.close()
    other = opened(write_projector(tmp_path / "other.gguf", "gemma4uv", sound="gemma4a"))
    with pytest.raises(PictureError, match=r"'gemma4a'.*--backend llama"):
        other.sound_tokens(1)
    other.close()


def test_a_plan_counts_the_sound_encoder(path: Path, tmp_path: Path) -> None:
    with open_model(path) as both, open_model(write_projector(tmp_path / "p.gguf", "gemma4uv")) as alone:
        assert vision_needs(both, 1).weights > vision_needs(alone, 1).weights + 64 * 640


@pytest.mark.parametrize("problem", ["missing", "narrow"])
def test_a_projection_that_does_not_fit_is_refused_by_name(problem: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        values = tensors.pop("mm.a.input_projection.weight")
        if problem == "narrow":
            tensors["mm.a.input_projection.weight"] = np.ascontiguousarray(values[:, :320])

    path = write_projector(tmp_path / "p.gguf", "gemma4uv", sound="gemma4ua", changed=change)
    with open_model(path) as file, pytest.raises(Exception, match=r"mm\.a\.input_projection") as caught:
        open_encoder(file, 1)
    assert str(path) in str(caught.value)
