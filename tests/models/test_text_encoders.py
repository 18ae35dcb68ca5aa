"""Pooled rows of every encoder equal llama.cpp's, and are bit-exact alone, in batches, and on any number of threads."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_kernels.isa import POLICY
from gguf_io import open_model
from gguf_io.errors import ModelFileError
from gguf_io.lora import Adapter
from models import weights
from models.adapters import AdapterSet
from models.errors import UnsupportedModelError
from models.native_runner import NativeRunner
from models.text_encoder import TextEncoder
from tests.gpu_offload import lora_files
from tests.models.encoders import ENCODERS, RERANKERS, in_type
from tests.models.synthetic import write
from tests.oracle import llama_oracle

MODELS = {f"{name}-encoder": model for name, model in ENCODERS.items()}
MODELS |= {f"{name}-reranker": model for name, model in RERANKERS.items()}
# Pages have 16 tokens, spans of attention 256, windows here 40.
LENGTHS = (1, 2, 15, 16, 17, 3, 100, 255, 256, 257, 400, 5, 512)
# One of each kind of layer.
HALVES = ("bert-encoder", "nomic-bert-moe-encoder", "modern-bert-reranker")
GEMMA = ENCODERS["gemma-embedding"]
TEXTS = [np.random.default_rng(length).integers(0, 320, length).tolist() for length in LENGTHS]
# llama.cpp rounds activations and keys to half precision in other places than we do; with F32 weights only that is
# left.
TOLERANCE = 4e-3


@pytest.fixture(params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(MODELS[request.param], tmp_path / f"{request.param}.gguf")


@pytest.fixture
def encoder(path: Path) -> Iterator[TextEncoder]:
    with open_model(path) as file, TextEncoder(file) as encoder:
        yield encoder


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_rows_are_llama_cpps(path: Path, encoder: TextEncoder) -> None:
    found = encoder.pooled(TEXTS)
    expected = np.stack([llama_oracle.pooled(path, text, encoder.dimensions) for text in TEXTS])
    assert found.shape == expected.shape and expected.std() > 0
    assert np.abs(found - expected).max() < TOLERANCE * max(expected.std(), np.abs(expected).max() / 4)


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_dense_layers_follow_the_pooling(tmp_path: Path) -> None:
    """llama.cpp aborts when it loads such files: it computes the states, and the layers are computed here."""
    plain = write(GEMMA, tmp_path / "plain.gguf")
    dense = {"dense_2.weight": "both inner, width", "dense_3.weight": "width, both inner"}
    path = write(replace(GEMMA, beside=dense), tmp_path / "dense.gguf")
    with open_model(path) as file, TextEncoder(file) as encoder:
        found = encoder.pooled(TEXTS)
        inner, outer = (file.dequantize(name) for name in dense)
    states = np.stack([llama_oracle.pooled(plain, text, 256) for text in TEXTS])
    expected = states @ inner.T @ outer.T
    assert np.abs(found - expected).max() < TOLERANCE * expected.std()


def test_a_row_is_the_same_alone_together_and_on_any_number_of_threads(path: Path, encoder: TextEncoder) -> None:
    together = encoder.pooled(TEXTS)
    np.testing.assert_array_equal(np.concatenate([encoder.pooled([text]) for text in TEXTS]), together)
    np.testing.assert_array_equal(encoder.pooled(TEXTS[::-1]), together[::-1])
    for threads in (1, 2):
        with open_model(path) as file, TextEncoder(file, threads=threads) as other:
            np.testing.assert_array_equal(other.pooled(TEXTS), together)


ADAPTED = ("bert-encoder", "nomic-bert-moe-encoder", "modern-bert-reranker", "gemma-embedding-encoder")
TARGETS = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_up", "ffn_gate", "ffn_down", "ffn_up_exps",
           "token_embd")  # fmt: skip
SETS: tuple[AdapterSet, ...] = ((), ((0, 1.0),), ((0, 0.5), (1, -1.0)))


@contextmanager
def adapted(path: Path, threads: int | None = None) -> Iterator[TextEncoder]:
    """A model with the two adapters beside it."""
    with ExitStack() as files:
        file = files.enter_context(open_model(path))
        beside = [files.enter_context(open_model(path.with_name(f"{number}.gguf"))) for number in range(2)]
        yield files.enter_context(TextEncoder(file, threads, adapters=[Adapter(one, file) for one in beside]))


def write_adapters(path: Path) -> list[lora_files.Factors]:
    """Two adapters beside a model."""
    made = [lora_files.factors(path, seed, 0.08, TARGETS, rank) for seed, rank in ((1, 4), (2, 20))]
    with open_model(path) as file:
        for number, one in enumerate(made):
            lora_files.write(path.with_name(f"{number}.gguf"), one, file.architecture)
    return made


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("name", ADAPTED)
def test_rows_with_adapters_are_llama_cpps_of_merged_weights(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    if model.experts:  # all are used: rounding would choose others where two are nearly equal
        model = replace(model, extra={**model.extra, "expert_used_count": model.experts})
    path = write(model, tmp_path / f"{name}.gguf")
    made, texts = write_adapters(path), TEXTS[3:9]
    plain = None
    with adapted(path) as encoder:
        for chosen in SETS:
            weighted = []
            for number, weight in chosen:
                of_tokens = {name: (b.T, a) for name, (a, b) in made[number].items() if name.startswith("token")}
                weighted.append((made[number] | of_tokens, weight))
            merged = lora_files.merge(path, tmp_path / "merged.gguf", *weighted)
            found = encoder.pooled(texts, chosen)
            expected = np.stack([llama_oracle.pooled(merged, text, encoder.dimensions) for text in texts])
            assert np.abs(found - expected).max() < TOLERANCE * max(expected.std(), np.abs(expected).max() / 4)
            plain = expected if plain is None else plain
            assert not chosen or np.abs(plain - expected).max() > 20 * TOLERANCE * expected.std()


@pytest.mark.parametrize("path", HALVES, indirect=True)
@pytest.mark.parametrize("kind", ["F32", "F16"])
@pytest.mark.usefixtures("words")
def test_adapters_change_a_row_alike_alone_together_and_in_half_precision(path: Path, kind: str) -> None:
    write_adapters(path)
    changed = in_type(path, path.with_stem("changed"), kind)
    with adapted(changed) as encoder, adapted(changed, 1) as other, open_model(changed) as file:
        for chosen in SETS:
            together = encoder.pooled(TEXTS, chosen)
            np.testing.assert_array_equal(np.concatenate([other.pooled([text], chosen) for text in TEXTS]), together)
        with TextEncoder(file) as plain:
            np.testing.assert_array_equal(plain.pooled(TEXTS), encoder.pooled(TEXTS))
    if kind == "F16":
        with adapted(in_type(changed, path.with_stem("plain"), "F32")) as encoder:
            expected = encoder.pooled(TEXTS, SETS[-1])
        assert np.abs(together - expected).max() < TOLERANCE * max(expected.std(), np.abs(expected).max() / 4)


@pytest.fixture(params=["F16", "BF16"])
def halves(request: pytest.FixtureRequest, path: Path) -> Path:
    """The file with its matrices in half precision."""
    return in_type(path, path.with_stem(request.param), request.param)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers' weights in half precision are packed as words, whatever is faster on this processor."""
    monkeypatch.setattr(weights, "POLICY", replace(POLICY, multiplies_words=True))


@pytest.mark.parametrize("path", HALVES, indirect=True)
@pytest.mark.usefixtures("words")
class TestHalfPrecision:
    """Weights that are rounded to words: see cpu_kernels.formats.words."""

    @pytest.mark.oracle
    @llama_oracle.needs_llama
    def test_rows_are_llama_cpps(self, halves: Path) -> None:
        """Of the same values in single precision: llama.cpp rounds activations to the type of the weights."""
        with open_model(halves) as file, TextEncoder(file) as encoder:
            found = encoder.pooled(TEXTS)
        plain = in_type(halves, halves.with_stem("plain"), "F32")
        expected = np.stack([llama_oracle.pooled(plain, text, encoder.dimensions) for text in TEXTS])
        assert np.abs(found - expected).max() < TOLERANCE * max(expected.std(), np.abs(expected).max() / 4)

    def test_rows_are_near_those_computed_as_floats(self, halves: Path) -> None:
        rows = []
        for each in (halves, in_type(halves, halves.with_stem("plain"), "F32")):
            with open_model(each) as file, TextEncoder(file) as encoder:
                rows.append(encoder.pooled(TEXTS))
        found, expected = rows
        assert 0 < np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()

    def test_a_row_is_the_same_alone_together_and_on_any_number_of_threads(self, halves: Path) -> None:
        with open_model(halves) as file, TextEncoder(file, threads=1) as encoder:
            together = encoder.pooled(TEXTS)
            np.testing.assert_array_equal(np.concatenate([encoder.pooled([text]) for text in TEXTS]), together)
            np.testing.assert_array_equal(encoder.pooled(TEXTS[::-1]), together[::-1])
        with open_model(halves) as file, TextEncoder(file, threads=2) as other:
            np.testing.assert_array_equal(other.pooled(TEXTS), together)


def test_texts_that_cannot_be_computed(tmp_path: Path) -> None:
    path = write(ENCODERS["bert"], tmp_path / "model.gguf")
    with open_model(path) as file, TextEncoder(file) as encoder:
        assert (encoder.max_tokens, encoder.dimensions) == (512, 256)
        assert encoder.pooled([]).shape == (0, 256)
        for text, problem in [([], "0 tokens"), ([1] * 513, "513 tokens"), ([320], "outside"), ([-1], "outside")]:
            with pytest.raises(ValueError, match=problem):
                encoder.pooled([[1], text])
    with pytest.raises(ValueError, match="closed"):
        encoder.pooled([[1]])


def test_encoders_are_not_runners(tmp_path: Path) -> None:
    for name, problem in [("bert", "the architecture 'bert'"), ("qwen2-sees-all", "does not generate text")]:
        path = write(ENCODERS[name], tmp_path / f"{name}.gguf")
        with open_model(path) as file, pytest.raises(UnsupportedModelError, match=problem):
            NativeRunner(file, kv_bytes=1 << 20, threads=1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"beside": {**ENCODERS["bert"].beside, "cls.norm.weight": "width"}}, "cls.norm.weight would not be used"),
        ({"architecture": "neo-bert"}, "does not support the architecture 'neo-bert'"),
    ],
)
def test_encoders_that_are_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = write(replace(ENCODERS["bert"], **changes), tmp_path / "model.gguf")
    with open_model(path) as file, pytest.raises(UnsupportedModelError, match=problem):
        TextEncoder(file, threads=1)


def test_norms_of_all_heads_need_heads_without_padding(tmp_path: Path) -> None:
    path = write(replace(ENCODERS["jina-bert-v2-code"], heads=8, kv_heads=8, head=24), tmp_path / "model.gguf")
    with open_model(path) as file, pytest.raises(UnsupportedModelError, match=r"attn_q_norm.* this one is 24"):
        TextEncoder(file, threads=1)


def test_a_reranker_without_a_head_is_refused(tmp_path: Path) -> None:
    path = write(replace(RERANKERS["bert"], beside=ENCODERS["bert"].beside), tmp_path / "model.gguf")
    with open_model(path) as file, pytest.raises(ModelFileError, match="no classification head"):
        TextEncoder(file, threads=1)
