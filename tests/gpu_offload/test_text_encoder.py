"""Vectors of texts against llama.cpp's hidden states, pooled here."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_io.errors import ModelFileError
from gguf_io.model_file import open_model
from gpu_offload import loading
from gpu_offload.options import LlamaOptions
from gpu_offload.text_encoder import LlamaTextEncoder
from tests.gguf_files import finish
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

EMBEDDING, INNER, VOCABULARY, CONTEXT = 64, 128, 300, 256
TEXTS = [[5, 6, 7], [9], [120, 44, 3, 3, 250, 17, 8], [6, 5, 7]]
OPTIONS = LlamaOptions(gpu_layers=0, threads=1)
POOLINGS = {
    gguf.PoolingType.MEAN: lambda states: states.mean(axis=0),
    gguf.PoolingType.CLS: lambda states: states[0],
    gguf.PoolingType.LAST: lambda states: states[-1],
}


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch):
    monkeypatch.setattr(loading, "can_repack", lambda: False)


def bert(path: Path, pooling: gguf.PoolingType) -> Path:
    """Write an encoder of two layers with random weights."""
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_block_count(2)
    writer.add_layer_norm_eps(1e-6)
    writer.add_causal_attention(False)
    writer.add_token_type_count(2)
    writer.add_pooling_type(pooling)
    rng = np.random.default_rng(11)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * 0.4).astype(np.float32))

    def linear(name: str, rows: int, columns: int) -> None:
        add(f"{name}.weight", rows, columns)
        add(f"{name}.bias", rows)

    def norm(name: str) -> None:
        add(f"{name}.weight", EMBEDDING)
        add(f"{name}.bias", EMBEDDING)

    add("token_embd.weight", VOCABULARY, EMBEDDING)
    add("position_embd.weight", CONTEXT, EMBEDDING)
    add("token_types.weight", 2, EMBEDDING)
    norm("token_embd_norm")
    for layer in range(2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            linear(f"blk.{layer}.{name}", EMBEDDING, EMBEDDING)
        norm(f"blk.{layer}.attn_output_norm")
        linear(f"blk.{layer}.ffn_up", INNER, EMBEDDING)
        linear(f"blk.{layer}.ffn_down", EMBEDDING, INNER)
        norm(f"blk.{layer}.layer_output_norm")
    finish(writer)
    return path


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def expected(path: Path, tokens: list[int], pooling: gguf.PoolingType) -> np.ndarray:
    states = POOLINGS[pooling](llama_oracle.hidden_states(path, tokens))
    return states / np.linalg.norm(states)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_encoders_vectors_are_its_pooled_states(tmp_path, pooling):
    path = bert(tmp_path / "bert.gguf", pooling)
    with open_model(path) as model, LlamaTextEncoder(model, OPTIONS) as encoder:
        found = unit(encoder.pooled(TEXTS))
        assert (encoder.dimensions, encoder.max_tokens) == (EMBEDDING, CONTEXT)
    np.testing.assert_allclose(found, [expected(path, text, pooling) for text in TEXTS], atol=2e-3)


def test_a_language_model_pools_the_mean(data_dir):
    path = data_dir / "models/gguf/stories260K-F32.gguf"
    with open_model(path) as model, LlamaTextEncoder(model, OPTIONS) as encoder:
        found = unit(encoder.pooled(TEXTS))
        np.testing.assert_allclose(unit(encoder.pooled(TEXTS[2:3])), found[2:3], atol=2e-3)
    np.testing.assert_allclose(found, [expected(path, text, gguf.PoolingType.MEAN) for text in TEXTS], atol=2e-3)


def test_more_texts_than_one_batch_holds(tmp_path):
    path = bert(tmp_path / "bert.gguf", gguf.PoolingType.MEAN)
    texts = [[3 + (number * position) % 290 for position in range(1 + number % 150)] for number in range(80)]
    with open_model(path) as model, LlamaTextEncoder(model, OPTIONS) as encoder:
        together = encoder.pooled(texts)
        alone = np.concatenate([encoder.pooled([text]) for text in texts])
        assert encoder.pooled([]).shape == (0, EMBEDDING)
    np.testing.assert_allclose(together, alone, atol=2e-3)


def test_bad_texts_and_models_are_refused(tmp_path):
    path = bert(tmp_path / "bert.gguf", gguf.PoolingType.MEAN)
    with open_model(path) as model, LlamaTextEncoder(model, OPTIONS) as encoder:
        for text, problem in [([], "0 tokens"), ([1] * 257, "257 tokens"), ([300], "outside"), ([-1], "outside")]:
            with pytest.raises(ValueError, match=problem):
                encoder.pooled([[1], text])
    with pytest.raises(ValueError, match="closed"):
        encoder.pooled([[1]])
    ranker = bert(tmp_path / "ranker.gguf", gguf.PoolingType.RANK)
    with open_model(ranker) as model, pytest.raises(ModelFileError, match="no classification head"):
        LlamaTextEncoder(model, OPTIONS)
