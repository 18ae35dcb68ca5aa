"""llama.cpp reads the built-in model's file as we do: the same tokens, and similar predictions."""

import itertools

import numpy as np
import pytest

from benchmarks.training.corpus import texts
from gguf_io import load_tokenizer, open_model
from models.builtin import path
from models.native_runner import NativeRunner
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

STRANGE = [
    " ",
    "two  spaces\n\n\ttab",
    "Äpfel, naïve, 123 4567 — 😀",
    "don't we'll",
    "`localllm pull qwen3:0.6b`",
    "a\r\nb",
]


def test_tokens_are_the_same() -> None:
    with open_model(path()) as file:
        tokenizer = load_tokenizer(file)
        for text in [*STRANGE, *itertools.islice(texts(5), 30)]:
            for special in (False, True):
                theirs = llama_oracle.tokenize(path(), text, parse_special=special)
                assert tokenizer.encode(text, parse_special=special) == theirs
            assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_predictions_are_near() -> None:
    with open_model(path()) as file:
        tokens = load_tokenizer(file).encode("".join(itertools.islice(texts(6), 3)), parse_special=True)[:256]
        runner = NativeRunner(file, kv_bytes=32 << 20)
        count = len(tokens)
        ours = runner.run(tokens, list(range(count)), [runner.create_sequence()] * count, list(range(count))).copy()
        runner.close()
    theirs = llama_oracle.prefill_logits(path(), tokens)
    expected, found = (rows - np.log(np.exp(rows).sum(-1, keepdims=True)) for rows in (theirs, ours))
    divergence = (np.exp(expected) * (expected - found)).sum(-1)
    assert divergence.mean() < 1e-3
    assert (expected.argmax(-1) == found.argmax(-1)).mean() > 0.97
