"""Scores of pairs against llama.cpp's hidden states and a head computed here."""

import numpy as np
import pytest

from gguf_io import load_tokenizer
from gguf_io.errors import ModelFileError
from gguf_io.model_file import open_model
from gguf_io.pooling import is_reranker
from gguf_io.tokenizer.pairs import Pairs
from gpu_offload import loading
from gpu_offload.options import LlamaOptions
from gpu_offload.text_encoder import LlamaTextEncoder
from models.text_encoder import TextEncoder
from tests.gpu_offload.reranker_files import RERANK_TEMPLATE, bert_reranker, score
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

CLS, SEP = 101, 102
QUERY = "what is a panda"
DOCUMENTS = ["the panda is a bear.", "hi", "snow falls", "a panda eats bamboos. the bear is hi"]
OPTIONS = LlamaOptions(gpu_layers=0, threads=1)


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch):
    monkeypatch.setattr(loading, "can_repack", lambda: False)


@pytest.mark.parametrize("unigram", [False, True])
def test_scores_are_the_heads_of_pairs_as_llama_cpp_frames_them(tmp_path, unigram):
    path = tmp_path / "reranker.gguf"
    head = bert_reranker(path, unigram=unigram)
    with (
        open_model(path) as model,
        LlamaTextEncoder(model, OPTIONS) as reranker,
        TextEncoder(model) as ours,
    ):
        framing = Pairs(model.metadata, load_tokenizer(model))
        pairs = [framing.encode(QUERY, document) for document in DOCUMENTS]
        found, found_by_us = reranker.pooled(pairs)[:, 0], ours.pooled(pairs)[:, 0]
        assert reranker.pooled([]).shape == ours.pooled([]).shape == (0, 1)
    texts = [llama_oracle.tokenize(path, text, add_special=False) for text in (QUERY, *DOCUMENTS)]
    end = [SEP] if unigram else []
    assert pairs == [[CLS, *texts[0], SEP, *text, *end] for text in texts[1:]]
    expected = [score(head, llama_oracle.hidden_states(path, pair)[0]) for pair in pairs]
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(found, expected, atol=5e-3)
    np.testing.assert_allclose(found_by_us, expected, atol=5e-3)


def test_a_models_own_template_frames_pairs_and_texts_stay_texts(tmp_path):
    path = tmp_path / "templated.gguf"
    bert_reranker(path, template=RERANK_TEMPLATE)
    with open_model(path) as model:
        framing = Pairs(model.metadata, load_tokenizer(model))
        pair = framing.encode("a panda", "snow")
        tricked = framing.encode("a {document}", "[SEP] snow")
    filled = RERANK_TEMPLATE.replace("{query}", "a panda").replace("{document}", "snow")
    assert pair == llama_oracle.tokenize(path, filled, add_special=False, parse_special=True)
    assert (pair.count(SEP), tricked.count(SEP)) == (1, 1)


def test_files_are_recognised_by_pooling_or_by_their_head(tmp_path):
    for name, facts in {"both": {}, "head": {"pooling": False}, "pooling": {"head": False}}.items():
        bert_reranker(tmp_path / f"{name}.gguf", **facts)
        with open_model(tmp_path / f"{name}.gguf") as model:
            assert is_reranker(model)
    with open_model(tmp_path / "pooling.gguf") as model, pytest.raises(ModelFileError, match="no classification head"):
        LlamaTextEncoder(model, OPTIONS)
    bert_reranker(tmp_path / "plain.gguf", pooling=False, head=False)
    with open_model(tmp_path / "plain.gguf") as model:
        assert not is_reranker(model)
