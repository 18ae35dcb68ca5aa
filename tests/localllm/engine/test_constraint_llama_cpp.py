"""GBNF grammars compared with llama.cpp's own grammar sampler: the same tokens are allowed at each place of whole
texts.
"""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from gguf_io import load_tokenizer, open_model
from localllm.engine.constraint import ConstraintKind, ConstraintVocabulary, compile_constraint
from tests.oracle import llama_oracle
from tests.oracle.llama_oracle import api

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

JSON_LIKE = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
LIST = 'root ::= item+\n# a list\nitem ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"'
SUM = 'root ::= (expr "=" num "\\n")+\nexpr ::= term ([-+*/] term)*\nterm ::= num | "(" expr ")"\nnum ::= [0-9]+'
WORDS = 'root ::= ("é" | "naïve" | "日本" | "x"?) [ж-я]{2,3} "."'
CASES = [
    (JSON_LIKE, '{"name": "Zoë \\u00e9", "list": [1, -2.5e+3, true, {}], "empty": null}\n'),
    (LIST, "- one\n- two things\n"),
    (SUM, "(1+23)*4=96\n5=5\n"),
    (WORDS, "naïveжзя."),
    (WORDS, "жз."),
]


class PeerGrammar:
    """llama.cpp's sampler for one grammar."""

    def __init__(self, model: Path, grammar: str) -> None:
        vocab = api().llama_model_get_vocab(llama_oracle.load(model, vocab_only=True))
        self._size = llama_oracle.vocab_size(model)
        self._sampler = api().llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
        assert self._sampler

    def __del__(self) -> None:
        api().llama_sampler_free(self._sampler)

    def mask(self) -> np.ndarray:
        data = (api().llama_token_data * self._size)(*[(token, 1.0, 0.0) for token in range(self._size)])
        array = api().llama_token_data_array(data, self._size, -1, False)
        api().llama_sampler_apply(self._sampler, ctypes.byref(array))
        return np.array([entry.logit == 1.0 for entry in data])

    def accept(self, token: int) -> None:
        api().llama_sampler_accept(self._sampler, token)


@pytest.mark.parametrize(("grammar", "text"), CASES)
def test_masks_agree_along_a_text(data_dir: Path, grammar: str, text: str) -> None:
    path = data_dir / "vocab" / "ggml-vocab-gpt-2.gguf"
    with open_model(path) as file:
        tokenizer = load_tokenizer(file)
    constraint = compile_constraint(ConstraintKind.GBNF, grammar, ConstraintVocabulary(tokenizer))
    peer = PeerGrammar(path, grammar)
    comparable = np.array([is_comparable(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
    for token in tokenizer.encode(text, add_special=False):
        ours, theirs = constraint.mask(), peer.mask()
        if constraint.forced_tokens():
            assert not np.any(ours & ~theirs)
        else:
            differing = np.flatnonzero((ours != theirs) & comparable).tolist()
            assert [tokenizer.token_bytes(other) for other in differing[:20]] == []
        constraint.accept(token)
        peer.accept(token)
    assert constraint.is_complete
    np.testing.assert_array_equal(constraint.mask()[comparable], peer.mask()[comparable])


def is_comparable(text: bytes) -> bool:
    """Whether llama.cpp decides exactly: not on NUL, on invalid UTF-8, and on parts of excluded characters."""
    try:
        return "\0" not in text.decode()
    except UnicodeDecodeError:
        return False
