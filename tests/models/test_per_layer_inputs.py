"""Second embeddings that stay in the file, and last layers that are computed only for wanted rows."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_io import open_model
from gguf_io.errors import LocalLLMError, ModelFileError
from models.native_runner import NativeRunner
from models.text_encoder import TextEncoder
from tests.models.architecture_models import MODELS
from tests.models.synthetic import Synthetic, shapes, write

TABLE = "per_layer_token_embd.weight"
TOKENS = np.random.default_rng(4).integers(0, 320, 120).tolist()


def open_runner(path: Path, threads: int | None = None) -> NativeRunner:
    with open_model(path) as file:
        return NativeRunner(file, kv_bytes=8 << 20, threads=threads)


def run(runner: NativeRunner, sequence: int, tokens: list[int], wanted: list[int]) -> np.ndarray:
    start = runner.sequence_length(sequence)
    positions = list(range(start, start + len(tokens)))
    return runner.run(tokens, positions, [sequence] * len(tokens), wanted).copy()


@pytest.fixture(scope="module", params=["gemma4", "gemma3n"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(MODELS[request.param], tmp_path_factory.mktemp("models") / "model.gguf")


@pytest.fixture
def runner(path: Path) -> Iterator[NativeRunner]:
    runner = open_runner(path)
    yield runner
    runner.close()


@pytest.mark.parametrize("wanted", [[], [0], [119], [0, 1, 2], [5, 7, 8, 30, 119], list(range(0, 120, 2))], ids=len)
def test_wanted_rows_are_what_all_rows_would_be(runner: NativeRunner, wanted: list[int]) -> None:
    first, second = runner.create_sequence(), runner.create_sequence()
    everything = run(runner, first, TOKENS, list(range(len(TOKENS))))
    np.testing.assert_array_equal(run(runner, second, TOKENS, wanted), everything[wanted])
    after = [run(runner, sequence, [7], [0]) for sequence in (first, second)]
    np.testing.assert_array_equal(*after)


@pytest.mark.parametrize("threads", [1, 2])
def test_wanted_rows_of_several_sequences(path: Path, threads: int) -> None:
    runner = open_runner(path, threads)
    lengths = (40, 1, 60)
    alone = []
    for length in lengths:
        sequence = runner.create_sequence()
        alone.append(run(runner, sequence, TOKENS[:length], list(range(length))))
    handles = [runner.create_sequence() for _ in lengths]
    pieces = list(zip(handles, lengths, strict=True))
    tokens = [token for length in lengths for token in TOKENS[:length]]
    rows = runner.run(
        tokens,
        [position for length in lengths for position in range(length)],
        [handle for handle, length in pieces for _ in range(length)],
        [10, 11, 39, 40, 41, 100],
    ).copy()
    expected = [alone[0][10], alone[0][11], alone[0][39], alone[1][0], alone[2][0], alone[2][59]]
    np.testing.assert_array_equal(rows, expected)
    runner.close()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_a_quantised_table_gives_its_values(kind: str, tmp_path: Path) -> None:
    """The same file with the table's values as floats gives the same results."""
    plain = write(MODELS["gemma4"], tmp_path / "plain.gguf")
    with open_model(plain) as file:
        values = {name: file.dequantize(name) for name in file.tensors}
    type_ = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(values[TABLE], type_)
    rounded = {**values, TABLE: gguf.quants.dequantize(packed, type_).astype(np.float32)}
    found = []
    for name, given in (("packed", {**values, TABLE: packed}), ("rounded", rounded)):
        types = {TABLE: type_} if name == "packed" else {}
        runner = open_runner(write(MODELS["gemma4"], tmp_path / f"{name}.gguf", values=given, types=types))
        found.append(run(runner, runner.create_sequence(), TOKENS, list(range(len(TOKENS)))))
        runner.close()
    np.testing.assert_array_equal(*found)


def test_a_file_that_was_changed_is_noticed_before_anything_is_appended(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    runner = open_runner(copy)
    sequence = runner.create_sequence()
    run(runner, sequence, TOKENS, [])
    os.truncate(copy, copy.stat().st_size // 2)
    with pytest.raises(ModelFileError, match="was changed while it was open"):
        run(runner, sequence, [1], [0])
    assert runner.sequence_length(sequence) == len(TOKENS)
    runner.check_integrity({sequence})
    runner.close()


def test_layers_that_share_keys_and_values_store_none(path: Path) -> None:
    with open_model(path) as file:
        name = file.architecture
    runner = open_runner(path)
    # gemma4: one head of 64 in four layers with a window, one of 128 in the fifth. gemma3n: two of 32 in twenty.
    # Numbers take two bytes, and each head's key and value four more.
    per_token = {"gemma4": 2 * (4 * (2 * 64 + 4) + 2 * 128 + 4), "gemma3n": 2 * 2 * (2 * 32 + 4) * 20}
    assert runner.info.kv_bytes_per_token * (1 + runner.info.window_pages) == pytest.approx(per_token[name])
    runner.close()


def test_states_of_all_rows_for_embeddings(tmp_path: Path) -> None:
    """Pooled rows need every row's state; they are the same in a batch and alone."""
    model = replace(MODELS["gemma4"], extra={**MODELS["gemma4"].extra, "pooling_type": 1})
    with open_model(write(model, tmp_path / "model.gguf")) as file, TextEncoder(file) as encoder:
        texts = [TOKENS[:50], TOKENS[50:60], TOKENS[:51]]
        together = encoder.pooled(texts)
        alone = np.concatenate([encoder.pooled([text]) for text in texts])
    np.testing.assert_array_equal(together, alone)
    assert np.abs(together[0] - together[2]).max() > 0


def _changed(name: str, **extra: object) -> Synthetic:
    return replace(MODELS[name], extra={**MODELS[name].extra, **{k.replace("__", "."): v for k, v in extra.items()}})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_changed("gemma4", attention__shared_kv_layers=9), "finds no layer to share keys and values with"),
        (_changed("gemma4-odd", attention__head_count_kv=[4, 3, 2, 4, 4, 2]), "8 heads of layer 1 cannot share 3"),
        (_changed("gemma4", attention__value_length_swa=32), "heads of 64 .* and 32 .* in layers with a window"),
        (_changed("gemma3n", altup__active_idx=1), "only where layers work on the first"),
        (_changed("gemma3n", altup__num_inputs=3), "num_inputs does not fit the tensor altup_proj.weight"),
        (_changed("gemma3n", embedding_length_per_layer_input=128), "per-layer embedding tensors are 256 wide"),
        (_changed("gemma3n-short", attention__shared_kv_layers=2), "does not say which layers have a window"),
        (replace(MODELS["gemma4"], dropped=("per_layer_model_proj.weight",)), "per_layer_model_proj.weight is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_do_not_fit_together(model: Synthetic, message: str, tmp_path: Path) -> None:
    path = write(model, tmp_path / "model.gguf")
    assert shapes(model)
    with open_model(path) as file, pytest.raises(LocalLLMError, match=message):
        NativeRunner(file, kv_bytes=1 << 20, threads=1)
