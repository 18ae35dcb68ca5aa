"""EAGLE-3 heads: their inputs and their drafts equal llama.cpp's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest

from gguf_io import open_model
from gguf_io.errors import ModelFileError
from models.drafting_layer import DraftingLayer, DraftRows
from models.errors import UnsupportedModelError
from models.kv_pages import Sequence
from models.native_runner import NativeRunner
from tests.gguf_files import copying, finish
from tests.models.architecture_models import MODELS
from tests.models.eagle_models import HEADS, OUTPUTS, TARGET, write_head
from tests.models.prediction_models import drafts
from tests.models.synthetic import Synthetic, write
from tests.oracle import llama_drafts, llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

TOKENS = np.random.default_rng(11).integers(0, 320, 48).tolist()
TOLERANCE = 1.6e-2  # of a standard deviation, as for layers of multi-token prediction


class Files(NamedTuple):
    model: Path
    head: Path


@pytest.fixture(scope="module", params=HEADS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("models")
    return Files(write(TARGET, folder / "model.gguf"), write_head(HEADS[request.param], folder / "head.gguf"))


@pytest.fixture
def runner(files: Files) -> Iterator[NativeRunner]:
    runner = load(files.model, files.head)
    yield runner
    runner.close()


def load(model: Path, head: Path) -> NativeRunner:
    with open_model(model) as file, open_model(head) as drafts:
        return NativeRunner(file, kv_bytes=64 << 20, threads=2, drafts=drafts)


def layer_of(runner: NativeRunner) -> DraftingLayer:
    assert runner.drafts is not None
    return runner.drafts.layer


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    finite = np.isfinite(theirs)
    return bool(np.abs(ours[finite] - theirs[finite]).max() < TOLERANCE * theirs[finite].std())


def append(runner: NativeRunner, sequence: int, tokens: list[int]) -> None:
    start = runner.sequence_length(sequence)
    runner.run(tokens, range(start, start + len(tokens)), [sequence] * len(tokens), [len(tokens) - 1])


@pytest.mark.parametrize("name", ["llama", "qwen3", "nemotron_h", "gpt-oss"])
def test_what_it_reads_is_what_goes_into_layers(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    layers = [0, 1, model.layers - 2]
    path = write(model, tmp_path / "model.gguf")
    read = what_is_read(model, path, layers)
    expected = llama_drafts.layer_inputs(path, TOKENS, layers)
    for at in range(3):
        part = slice(at * model.embedding, (at + 1) * model.embedding)
        assert close(read[:, part], expected[:, part]), layers[at]


def test_it_reads_rows_without_what_the_model_divides_them_by(tmp_path: Path) -> None:
    model = MODELS["granite"]
    path = write(model, tmp_path / "model.gguf")
    with open_model(path) as file:
        embedded = file.dequantize("token_embd.weight")[TOKENS] * model.extra["embedding_scale"]
    assert model.extra["residual_scale"] != 1
    assert close(what_is_read(model, path, [0, 1, 1])[:, : model.embedding], embedded)


def what_is_read(model: Synthetic, path: Path, layers: list[int]) -> np.ndarray:
    """The head's inputs from these layers after TOKENS."""
    made = replace(HEADS["own"], extra={"target_layers": layers, "target_hidden_size": model.embedding})
    made = replace(made, vocabulary=model.vocabulary)
    made = replace(made, beside={**made.beside, "fc.weight": f"width, {3 * model.embedding}"})
    runner = load(path, write_head(made, path.with_name("head.gguf")))
    append(runner, runner.create_sequence(), TOKENS)
    read = layer_of(runner).prepared(runner.states[: len(TOKENS)]).copy()
    runner.close()
    return read


def test_its_logits_are_those_of_llama_cpp(files: Files, runner: NativeRunner) -> None:
    features = llama_drafts.layer_inputs(files.model, TOKENS, [1, 2, 3])
    states, expected, after = llama_drafts.guessed_by_head(files.head, files.model, TOKENS[1:], features[:-1])
    layer, single, whole = layer_of(runner), Sequence(), Sequence()
    for at, token in enumerate(TOKENS[1:]):
        _, state = layer.run([DraftRows(single, [token], features[at : at + 1])], layer.reaches[-1])
        found = in_vocabulary(runner, layer.logits.values[0, : layer.reaches[-1]])
        assert close(found, expected[at]), at
        assert close(state[0], after[at]), at
    layer.run([DraftRows(whole, TOKENS[1:], features[:-1])], layer.reaches[-1])
    np.testing.assert_array_equal(in_vocabulary(runner, layer.logits.values[0, : layer.reaches[-1]]), found)
    guessed = Sequence()
    layer.run([DraftRows(guessed, TOKENS[1:], states, guessed=True)], layer.reaches[-1])
    assert close(in_vocabulary(runner, layer.logits.values[0, : layer.reaches[-1]]), expected[-1])


def in_vocabulary(runner: NativeRunner, logits: np.ndarray) -> np.ndarray:
    """Logits of outputs as logits of tokens."""
    found = np.full(runner.info.vocab_size, -np.inf, np.float32)
    tokens = layer_of(runner).tokens
    found[np.arange(len(logits)) if tokens is None else tokens] = logits
    return found


def test_a_draft_begins_with_the_likeliest_token_after_the_text(files: Files, runner: NativeRunner) -> None:
    features = llama_drafts.layer_inputs(files.model, TOKENS, [1, 2, 3])
    _, expected, _ = llama_drafts.guessed_by_head(files.head, files.model, TOKENS[1:], features[:-1])
    sequence = runner.create_sequence()
    for start, stop in ((0, 20), (20, 21), (21, 47)):
        append(runner, sequence, TOKENS[start:stop])
        drafts(runner, [(sequence, TOKENS[stop], 3)])  # whose rejected drafts must leave nothing behind
    (drafted,) = drafts(runner, [(sequence, TOKENS[47], 4)])
    assert len(drafted) == 4 and all(np.isfinite(expected[-1][token]) for token in drafted)
    finite = expected[-1][np.isfinite(expected[-1])]
    assert expected[-1][drafted[0]] > finite.max() - TOLERANCE * finite.std()
    assert drafts(runner, [(sequence, TOKENS[47], 4)]) == [drafted]
    runner.check_integrity({sequence})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"target_hidden_size": 512}, "drafts for a model of width 512"),
        ({"target_layers": [1, 2, 5]}, "layers 1, 2, 5"),
        ({"target_layers": [1, 2]}, "layers 1, 2."),
        ({"block_count": 2}, "block_count is 2"),
        ({"without": "token_embd.weight"}, "has no token_embd.weight and cannot use the model's"),
    ],
)
def test_heads_of_other_models_are_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    model, head = write(TARGET, tmp_path / "model.gguf"), HEADS["own"]
    extra = {key: value for key, value in {**head.extra, **changed}.items() if key != "without"}
    made = replace(head, extra=extra, dropped=tuple(filter(None, [changed.get("without")])))
    path = write_head(made, tmp_path / "head.gguf")
    with pytest.raises((ModelFileError, UnsupportedModelError), match=said):
        load(model, path)


@pytest.mark.parametrize("ids", [np.full(OUTPUTS, 320), np.full(OUTPUTS, -1)])
def test_outputs_for_no_token_are_refused(ids: np.ndarray, tmp_path: Path) -> None:
    model, head = write(TARGET, tmp_path / "model.gguf"), write_head(HEADS["own"], tmp_path / "head.gguf")
    reader, writer = copying(head, tmp_path / "changed.gguf")
    for tensor in reader.tensors:
        if tensor.name == "d2t":
            writer.add_tensor("d2t", ids.astype(np.int64), raw_dtype=gguf.GGMLQuantizationType.I64)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    with pytest.raises(ModelFileError, match=r"d2t names a token outside 0\.\.319"):
        load(model, finish(writer))
