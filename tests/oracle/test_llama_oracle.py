"""The oracle itself, against texts and token ids from elsewhere (golden.json)."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]


@pytest.fixture
def golden(data_dir: Path) -> dict[str, list[dict[str, object]]]:
    return json.loads((data_dir / "models/golden.json").read_text())["files"]


@pytest.mark.parametrize("name", ["stories260K-F32.gguf", "tinystories656K-F32.gguf"])
def test_greedy_ids_and_logits_are_the_golden_ones(data_dir, golden, name):
    path = data_dir / "models/gguf" / name
    for case in golden[name]:
        prompt = case["ids"]
        assert llama_oracle.tokenize(path, case["prompt"]) == prompt
        expected = case["np_greedy"]
        assert llama_oracle.greedy(path, prompt, len(expected)) == expected
        logits = llama_oracle.prefill_logits(path, prompt)
        np.testing.assert_allclose(logits[-1, :8], case["logits8"], atol=1e-2)


def test_prefill_and_decode_agree_nearly(data_dir):
    path = data_dir / "models/gguf/stories260K-F32.gguf"
    ids = llama_oracle.tokenize(path, "Once upon a time, there was a little girl")
    prefill, decode = llama_oracle.prefill_logits(path, ids), llama_oracle.decode_logits(path, ids)
    assert prefill.shape == (len(ids), llama_oracle.vocab_size(path))
    np.testing.assert_allclose(prefill, decode, atol=2e-2)


def test_text_that_would_abort_the_process_is_refused(data_dir):
    path = data_dir / "models/gguf/tinystories656K-F32.gguf"
    with pytest.raises(ValueError, match="no byte tokens"):
        llama_oracle.tokenize(path, "日本")


def test_detokenize_and_pieces_give_the_text_back(data_dir):
    path = data_dir / "vocab/ggml-vocab-qwen2.gguf"
    ids = llama_oracle.tokenize(path, "Hello, wörld! 日本")
    assert llama_oracle.detokenize(path, ids) == "Hello, wörld! 日本".encode()
    assert b"".join(llama_oracle.piece(path, token) for token in ids) == "Hello, wörld! 日本".encode()


def test_more_models_than_are_kept_open(data_dir):
    paths = sorted((data_dir / "models/gguf").glob("*.gguf"))
    for _ in range(2):
        assert all(np.isfinite(llama_oracle.prefill_logits(path, [1, 2, 3])).all() for path in paths)
