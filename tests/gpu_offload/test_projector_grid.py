"""Images of models with multi-dimensional positions (M-RoPE), compared with llama.cpp's own processing."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gguf_io.image_rows import ImageRows
from gpu_offload import loading
from gpu_offload.runner import LlamaCppRunner
from tests.gpu_offload.projector_runs import (
    AFTER,
    append,
    batch_difference,
    close_sequences,
    opened,
    oracle_logits,
    positions_of,
    see,
    whole_prompt,
)
from tests.oracle import llama_oracle
from tests.picture_files import png
from tests.projector_files import write_projector, write_qwen2vl

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

WIDE = png(3, width=96, height=48)


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch):
    monkeypatch.setattr(loading, "can_repack", lambda: False)


@pytest.fixture(scope="module")
def files(data_dir, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("qwen2vl_merger")
    return (
        write_qwen2vl(data_dir / "models/gguf/stories260K-F32.gguf", folder / "model.gguf"),
        write_projector(folder / "mmproj.gguf", "qwen2vl_merger"),
    )


@pytest.fixture(scope="module")
def loaded(files) -> Iterator[LlamaCppRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "can_repack", lambda: False)
        made = opened(*files, batch_rows=16)  # WIDE takes two steps
    yield made
    made.close()


@pytest.fixture
def runner(loaded) -> Iterator[LlamaCppRunner]:
    yield loaded
    close_sequences(loaded)


@pytest.fixture(scope="module")
def tolerance(files, loaded) -> float:
    """The rounding error on this processor, far below the effect of another image (0.05)."""
    return 2 * batch_difference(loaded, whole_prompt(files[0], see(loaded, WIDE))) + 1e-3


def rows_of(runner: LlamaCppRunner, image: bytes) -> ImageRows:
    (rows,) = [piece for piece in see(runner, image) if isinstance(piece, ImageRows)]
    return rows


def test_rows_stand_in_a_grid_that_takes_fewer_positions(runner):
    rows = rows_of(runner, WIDE)
    width, height = 6, 3  # of 16 pixels each
    assert len(rows.ids) == width * height and rows.grid.count == width
    time, y, x, _ = rows.positions(10, 0, len(rows.ids)).reshape(4, -1)
    assert set(time) == {10}
    assert y.tolist() == [10 + row // width for row in range(width * height)]
    assert x.tolist() == [10 + row % width for row in range(width * height)]


def test_logits_after_an_image_are_llama_cpps(files, runner, tolerance):
    sequence = runner.create_sequence()
    prompt = whole_prompt(files[0], see(runner, WIDE))
    found = append(runner, sequence, prompt, wanted=True)[-1]
    expected = oracle_logits(*files, WIDE)
    np.testing.assert_allclose(found, expected, atol=tolerance)
    assert np.abs(oracle_logits(*files, png(4, width=96, height=48)) - expected).max() > 0.05

    # A fork after the image, one before it, and a truncated one all continue at the right positions.
    text, mark = len(prompt[0]), len(prompt[1])  # the mark is before the image
    stored = runner.sequence_length(sequence)
    fork, end = runner.fork_sequence(sequence, stored - len(prompt[-1])), positions_of(prompt[:-1])
    np.testing.assert_allclose(append(runner, fork, prompt[-1:], True, end)[-1], expected, atol=tolerance)
    runner.truncate_sequence(fork, stored - len(prompt[-1]))
    np.testing.assert_allclose(append(runner, fork, prompt[-1:], True, end)[-1], expected, atol=tolerance)
    before = runner.fork_sequence(sequence, text)
    np.testing.assert_allclose(append(runner, before, prompt[1:], wanted=True)[-1], expected, atol=tolerance)
    with pytest.raises(ValueError, match="within an image"):
        runner.fork_sequence(sequence, text + mark + 1)


def test_text_around_images_is_saved_and_restored_at_its_positions(files, runner, tolerance):
    sequence, other = runner.create_sequence(), runner.create_sequence()
    prompt = whole_prompt(files[0], (*see(runner, WIDE), *see(runner, png(5))))
    append(runner, sequence, prompt)
    stored, tail = runner.sequence_length(sequence), len(prompt[-1])
    data = runner.export_kv(sequence, stored - tail, stored)
    append(runner, other, prompt[:-1])
    runner.import_kv(other, stored - tail, stored, data)
    # The last row is computed alone, both in the restored sequence and in the original.
    found = []
    for one in (sequence, other):
        runner.truncate_sequence(one, stored - 1)
        found.append(append(runner, one, (prompt[-1][-1:],), True, positions_of(prompt) - 1)[-1])
    np.testing.assert_allclose(found[1], found[0], atol=tolerance)
    assert len(AFTER) > tail > 1
