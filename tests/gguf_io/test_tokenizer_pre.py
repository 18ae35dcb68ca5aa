"""Every pre-tokenizer that llama.cpp knows splits as llama.cpp does, tested with merges across all boundaries."""

import ctypes

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from gguf_io import load_tokenizer
from gguf_io.errors import TokenizerError
from gguf_io.tokenizer.pretokenizers import PRE_TOKENIZERS
from tests.gguf_io.tokenizer_files import BYTE, NORMAL, sample_texts, trained_pairs, write_vocabulary
from tests.oracle import llama_oracle

# From llama.cpp's llama_vocab::impl::load.
NAMES = """
default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano deepseek-llm
deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es
jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4 granite-embed-multi-311m sarvam-moe jina-v1-en jina-v2-code
roberta-bpe refact command-r qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 olmo dbrx smaug-bpe poro-chat
chatglm-bpe glm4 glm5 viking jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4 exaone-moe chameleon
minerva-7b megrez gpt-4o llama4 kanana2 talkie granite-embed-multi-97m tiny_aya cohere2moe superbpe trillion
granite-docling bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2 ufakzeka
grok-2 afmoe laguna minimax-m2 solar-open mellum2
""".split()  # noqa: SIM905 - one name a line would be ninety lines

# One name of each way to cut: these get all texts, the others enough to see that theirs is the right one.
FIRST = list({PRE_TOKENIZERS[name]: name for name in reversed(NAMES)}.values())


def test_all_names_are_known():
    assert sorted(PRE_TOKENIZERS) == sorted(NAMES)


@pytest.fixture
def write(tmp_path):
    def write(pre: str | None, **options):
        tokens, merges = trained_pairs(pre is None or PRE_TOKENIZERS[pre].byte_level)
        types = [BYTE if len(token) == 6 and token.startswith("<0x") else NORMAL for token in tokens]
        options = {"pre": pre, "types": types, "merges": merges, "bos_token_id": 0, "eos_token_id": 1} | options
        return write_vocabulary(tmp_path / "vocabulary.gguf", tokens, **options)

    return write


# All characters but those of private use and the planes without any.
CHARACTERS = "".join(map(chr, [*range(0xD800), *range(0xF900, 0x40000), *range(0xE0000, 0xE0200)]))
# Letters, numbers, marks, punctuation and signs: how many characters Unicode 16.0 has of each
# (DerivedGeneralCategory.txt), and the bit that llama.cpp's unicode_cpt_flags has for it.
CLASSES = {"L": (141_028, 0x04), "N": (1_911, 0x02), "M": (2_501, 0x10), "P": (855, 0x20), "S": (8_514, 0x40)}


def members(name: str) -> set[str]:
    """The characters of a class in patterns."""
    return set("".join(piece for piece, _ in Split(Regex(rf"\P{{{name}}}+"), "removed").pre_tokenize_str(CHARACTERS)))


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_characters_are_of_one_unicode_version(name):
    """With every Python, whose own tables differ, and with every version of `tokenizers` that we allow."""
    assert len(members(name)) == CLASSES[name][0]


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_classes_differ_from_the_oracles_only_in_characters_it_does_not_know():
    """Its tables are those of Unicode 15.1: it cuts the 5,185 newer characters as it cuts unassigned ones."""
    flags = llama_oracle.api()._lib._Z26unicode_cpt_flags_from_cptj
    flags.argtypes, flags.restype = [ctypes.c_uint32], ctypes.c_uint16
    theirs = {one: flags(ord(one)) for one in CHARACTERS}
    newer: set[str] = set()
    for name, (_, bit) in CLASSES.items():
        ours = members(name)
        assert {one for one, found in theirs.items() if found & bit} <= ours
        newer |= {one for one in ours if not theirs[one] & bit}
    assert len(newer) == 5_185 and not any(theirs[one] & 0xFE for one in newer)


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("pre", NAMES)
def test_cuts_as_the_oracle_does(write, pre):
    path = write(pre)
    tokenizer = load_tokenizer(path)
    for text in sample_texts(2, 300 if pre in FIRST else 60):
        assert tokenizer.encode(text) == llama_oracle.tokenize(path, text), text


@pytest.mark.parametrize("pre", [name for name in FIRST if PRE_TOKENIZERS[name].cuts])
def test_a_text_that_is_encoded_in_pieces_has_the_same_tokens(write, pre, monkeypatch):
    """Split at every possible place."""
    tokenizer = load_tokenizer(write(pre))
    texts = [
        text.join(ends)
        for text in sample_texts(3, 300)
        for ends in zip("a!Z字", ("\nb", " c\nд", " e f", "\n字"), strict=True)
    ]
    whole = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr("gguf_io.tokenizer.tokenizer._PIECE", 0)
    assert [tokenizer.encode(text) for text in texts] == whole
    assert any(len(list(tokenizer.pieces(text))) > 1 for text in texts)


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.slow
@pytest.mark.parametrize("pre", ["default", "llama3", "qwen2", "qwen35", "tekken", "gpt-4o", "deepseek-v3", "gemma4"])
def test_long_texts_too(write, data_dir, pre):
    path = write(pre)
    tokenizer = load_tokenizer(path)
    text = (data_dir / "text/wikitext2_test.txt").read_text(encoding="utf-8")
    for start in range(0, 300_000, 3000):
        part = text[start : start + 3000]
        assert tokenizer.encode(part) == llama_oracle.tokenize(path, part)


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_gemma_4_files_that_deny_bos_get_it(write):
    path = write("gemma4", model="gemma4", add_bos_token=False)
    assert load_tokenizer(path).encode("a") == llama_oracle.tokenize(path, "a")
    assert load_tokenizer(path).encode("a")[0] == 0


def test_an_unknown_name_is_an_error_that_names_it(tmp_path):
    tokens, merges = trained_pairs(byte_level=True)
    path = write_vocabulary(tmp_path / "vocabulary.gguf", tokens, pre="next-year", merges=merges)
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre is 'next-year'"):
        load_tokenizer(path)


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_a_missing_name_is_the_default_with_a_warning(write, caplog):
    path = write(None)
    tokenizer = load_tokenizer(path)
    assert "tokenizer.ggml.pre is missing" in caplog.text
    assert tokenizer.pre == "default"
    for text in sample_texts(3, 100):
        assert tokenizer.encode(text) == llama_oracle.tokenize(path, text)


@pytest.mark.parametrize("merge", ["ab", "a ", " a", "a zzzz"])
def test_damaged_merges_are_an_error_that_names_them(write, merge):
    tokenizer = load_tokenizer(write("gpt-2", merges=["a b", merge]))
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.merges"):
        tokenizer.encode("abc")
