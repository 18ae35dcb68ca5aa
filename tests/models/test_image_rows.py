"""Rows of an image among tokens on the native engine, against llama.cpp, and bit by bit against other computations."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from gguf_io import open_model
from gguf_io.image_rows import ImageGrid, ImagePieces, ImageRows, ImageSpans
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from models.config import read_config, reading_images
from models.errors import UnsupportedModelError
from models.native_runner import NativeRunner
from tests.gpu_offload.projector_runs import append, positions_of
from tests.models.architecture_models import MODELS
from tests.models.synthetic import Synthetic, write
from tests.oracle import llama_oracle

TOLERANCE = 4e-3


@dataclass(frozen=True)
class Case:
    """A model, the rows of its images, and their columns if positions have components. parts: of a row."""

    model: str
    rows: tuple[int, ...]
    sees_all: bool = False
    columns: int = 0
    parts: int = 1

    @property
    def together(self) -> int:
        """The most rows that see each other."""
        return max(self.rows) if self.sees_all else 0

    @property
    def written(self) -> Synthetic:
        """The model; llama.cpp does not add parts to the last layer."""
        model = replace(MODELS[self.model], context=2048)
        return replace(model, extra={**model.extra, "n_deepstack_layers": self.parts - 1}) if self.parts > 1 else model


CASES = (
    Case("llama", (5, 600)),
    Case("gemma3", (40, 3), sees_all=True),
    Case("gemma3", (700, 40)),
    Case("gemma4", (25,)),
    Case("gemma4-odd", (70, 16), sees_all=True),
    Case("gemma4-odd", (1120, 16), sees_all=True),
    Case("gemma3", (700, 40), sees_all=True),
    Case("granite", (20,)),
    Case("qwen2vl", (24, 12), columns=6),
    Case("qwen3vl", (24, 600), columns=4, parts=2),
    Case("qwen3vlmoe", (30,), columns=5),
    Case("qwen35", (24, 600), columns=4),
    Case("qwen35moe", (30, 45), columns=5),
    Case("lfm2", (21, 600)),
)


def pieces_of(case: Case, model: Synthetic, seed: int = 0) -> ImagePieces:
    """Text, an image, text, and so on."""
    random = np.random.default_rng(seed)
    pieces: list[ImageRows | tuple[int, ...]] = []
    first = 1 << 62
    for count in case.rows:
        pieces.append(tuple(random.integers(0, model.vocabulary, 37).tolist()))
        grid = None
        if case.columns:
            y, x = np.divmod(np.arange(count, dtype=np.int32), np.int32(case.columns))
            still = np.zeros(count, np.int32)
            places = np.ascontiguousarray(np.stack([still, y, x, still]))
            grid = ImageGrid(places, np.array([1, 1, 1, 0], np.int32), max(int(y[-1]) + 1, case.columns))
        embeddings = random.standard_normal((count, case.parts * model.embedding)).astype(np.float32)
        pieces.append(ImageRows(tuple(range(first, first + count)), embeddings, case.sees_all, grid))
        first += count
    pieces.append(tuple(random.integers(0, model.vocabulary, 20).tolist()))
    return tuple(pieces)


def spans_of(pieces: ImagePieces) -> ImageSpans:
    rows = {piece.ids[0]: piece for piece in pieces if isinstance(piece, ImageRows)}
    return ImageSpans([one for piece in pieces for one in (piece.ids if isinstance(piece, ImageRows) else piece)], rows)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.model}-{case.rows[0]}{case.sees_all or ''}")
def loaded(request, tmp_path_factory) -> Iterator[tuple[Case, Path, NativeRunner]]:
    case = request.param
    path = write(case.written, tmp_path_factory.mktemp("images") / "model.gguf")
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=64 << 20, config=reading_images(file, read_config(file), case.together))
    yield case, path, runner
    runner.close()


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_logits_after_images_equal_llama_cpps(loaded):
    case, path, runner = loaded
    pieces = pieces_of(case, MODELS[case.model])
    options = LlamaOptions(
        context_tokens=2048, max_sequences=1, gpu_layers=0, threads=1, type_k="f32", type_v="f32", batch_rows=1152
    )
    with open_model(path) as file:
        llama = LlamaCppRunner(file, options)
    try:
        expected = append(llama, llama.create_sequence(), pieces, wanted=True)[-1]
    finally:
        llama.close()
    found = append(runner, runner.create_sequence(), pieces, wanted=True)[-1]
    assert np.abs(found - expected).max() < 6 * TOLERANCE * expected.std()
    assert np.sqrt(((found - expected) ** 2).mean()) < 2 * TOLERANCE * expected.std()
    other = append(runner, runner.create_sequence(), pieces_of(case, MODELS[case.model], 1), wanted=True)[-1]
    assert np.abs(found - other).max() > 20 * TOLERANCE * expected.std()


def test_bits_do_not_depend_on_how_a_sequence_came_about(loaded):
    case, path, runner = loaded
    pieces = pieces_of(case, MODELS[case.model])
    whole = runner.create_sequence()
    expected = append(runner, whole, pieces, wanted=True)[-1]
    length, end = runner.sequence_length(whole), positions_of(pieces[:-1])
    kept = length - len(pieces[-1])
    # A fork after the last image, whose text is computed token by token.
    spans = spans_of(pieces)
    fork = runner.fork_sequence(whole, kept)
    runner.know_images(fork, spans)
    for at, token in enumerate(pieces[-1]):
        found = append(runner, fork, ((token,),), True, end + at)[-1]
    np.testing.assert_array_equal(found, expected)
    # Exported, and imported into a new sequence.
    if not runner.info.window_tokens:
        restored = runner.create_sequence()
        runner.know_images(restored, spans)
        runner.import_kv(restored, 0, kept, runner.export_kv(whole, 0, kept))
        np.testing.assert_array_equal(append(runner, restored, pieces[-1:], True, end)[-1], expected)
    # On more threads, in a runner of its own.
    with open_model(path) as file:
        threads = runner.team.threads % 2 + 1
        config = reading_images(file, read_config(file), case.together)
        other = NativeRunner(file, kv_bytes=64 << 20, config=config, threads=threads)
    try:
        np.testing.assert_array_equal(append(other, other.create_sequence(), pieces, wanted=True)[-1], expected)
    finally:
        other.close()


def test_rows_that_cannot_be_appended_change_nothing(loaded):
    case, _, runner = loaded
    (rows, *_) = (piece for piece in pieces_of(case, MODELS[case.model]) if isinstance(piece, ImageRows))
    sequence = runner.create_sequence()
    wrong_grid = (
        ImageGrid(np.zeros((4, len(rows.ids)), np.int32), np.ones(4, np.int32), 1) if rows.grid is None else None
    )
    for wrong, message in (
        (replace(rows, embeddings=rows.embeddings[:, 1:]), "are not rows of"),
        (replace(rows, ids=(), embeddings=rows.embeddings[:0]), "are not rows of"),
        (replace(rows, grid=wrong_grid), "positions of another kind"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.append_image(sequence, wrong, 0)
    count = max(512, case.together) + 1
    many = ImageRows(tuple(range(count)), np.zeros((count, rows.embeddings.shape[1]), np.float32), True)
    with pytest.raises(ValueError, match=f"{count} rows see each other"):
        runner.append_image(sequence, many, 0)
    assert runner.sequence_length(sequence) == 0
    runner.check_integrity({*runner.sequences})


def test_a_sequence_cut_before_or_after_an_image_continues_with_the_same_bits(loaded):
    """States are where they were, or are made from the rows before them, images included."""
    case, _, runner = loaded
    pieces = pieces_of(case, MODELS[case.model])
    spans, whole = spans_of(pieces), runner.create_sequence()
    expected = append(runner, whole, pieces, wanted=True)[-1]
    for end in range(1, len(pieces), 2):  # before each image, and after it
        for before in (pieces[:end], pieces[: end + 1]):
            kept = sum(len(piece.ids) if isinstance(piece, ImageRows) else len(piece) for piece in before)
            if runner.reusable(whole, kept) < kept:
                continue
            fork = runner.fork_sequence(whole, kept)
            runner.know_images(fork, spans)
            found = append(runner, fork, pieces[len(before) :], True, positions_of(before))[-1]
            np.testing.assert_array_equal(found, expected)
            runner.free_sequence(fork)


@pytest.mark.parametrize(("name", "what"), [("gemma3n", "parallel streams")])
def test_models_whose_images_need_llama_cpp(name, what, tmp_path):
    path = write(MODELS[name], tmp_path / "model.gguf")
    with open_model(path) as file, pytest.raises(UnsupportedModelError, match=f"has {what}, and images"):
        reading_images(file, read_config(file))


def test_a_runner_without_a_projector_takes_no_images(tmp_path):
    path = write(MODELS["llama"], tmp_path / "model.gguf")
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=1 << 20)
    embeddings = np.zeros((1, MODELS["llama"].embedding), np.float32)
    with pytest.raises(ValueError, match="are not rows of 0"):
        runner.append_image(runner.create_sequence(), ImageRows((1,), embeddings, False), 0)
    runner.close()
