"""Real vocabularies: llama.cpp's published cases, and llama.cpp itself on random text and on every token."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_io import load_tokenizer, open_model
from gguf_io.tokenizer import Tokenizer
from tests.gguf_io.tokenizer_files import TEXTS
from tests.oracle import llama_oracle

VOCABULARIES = [
    *(f"vocab/ggml-vocab-{name}.gguf" for name in ("gpt-2", "starcoder", "deepseek-coder", "llama-bpe", "qwen2")),
    "vocab/ggml-vocab-llama-spm.gguf",
    "models/src/stories260K.gguf",
    "models/gguf/tinystories656K-F32.gguf",
]
CASES = [name for name in VOCABULARIES if name.startswith("vocab/")]

# Qwen's "</s>" ends HTML's strike-through. llama.cpp treats it as an end of text; we do not.
QWEN_STRIKE = {"vocab/ggml-vocab-qwen2.gguf": 128247}

cached_tokenizer = cache(load_tokenizer)


@pytest.mark.parametrize("name", CASES)
def test_published_cases(data_dir, name):
    path = data_dir / name
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = [
        [int(token) for token in line.split()] for line in path.with_suffix(".gguf.out").read_text().split("\n")
    ]
    tokenizer = cached_tokenizer(path)
    assert len(texts) >= 40
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text, add_special=False) == ids, text


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_long_texts_have_the_same_tokens_in_pieces(data_dir, name, monkeypatch):
    tokenizer = cached_tokenizer(data_dir / name)
    assert tokenizer.encoder.cuts is not None
    for path in sorted((data_dir / "text").glob("*.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")[:100_000]
        tokens = []
        for size in (len(text), 1 << 14, 20):
            monkeypatch.setattr("gguf_io.tokenizer.tokenizer._PIECE", size)
            tokens.append(tokenizer.encode(text))
        assert tokens[0] == tokens[1] == tokens[2], path.name


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=150)
@given(text=TEXTS, add_special=st.booleans(), parse_special=st.booleans())
def test_random_text_gives_the_oracle_s_ids(data_dir, name, text, add_special, parse_special):
    path = data_dir / name
    tokenizer = cached_tokenizer(path)
    if parse_special and name in QWEN_STRIKE:
        text = text.replace("</s>", "")
    if "tinystories" in name:
        text = _expressible(tokenizer, text)
    expected = llama_oracle.tokenize(path, text, add_special=add_special, parse_special=parse_special)
    assert tokenizer.encode(text, add_special, parse_special) == expected


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_token_is_spelled_and_classed_as_the_oracle_does(data_dir, name):
    path = data_dir / name
    tokenizer = cached_tokenizer(path)
    api = llama_oracle.api()
    vocab = api.llama_model_get_vocab(llama_oracle.load(path, vocab_only=True))
    assert tokenizer.vocab_size == api.llama_vocab_n_tokens(vocab)
    ends = set()
    spelled, shown = (llama_oracle.pieces(path, special=special) for special in (True, False))
    for token in range(tokenizer.vocab_size):
        if api.llama_vocab_is_eog(vocab, token):
            ends.add(token)
        if token == QWEN_STRIKE.get(name):
            continue
        assert tokenizer.is_control(token) == api.llama_vocab_is_control(vocab, token), token
        assert tokenizer.token_bytes(token) == spelled[token], token
        assert tokenizer.token_bytes(token, skip_special=True) == shown[token], token
    assert tokenizer.eog_ids == ends - {QWEN_STRIKE.get(name)}


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("name", VOCABULARIES)
def test_special_ids_and_flags(data_dir, name):
    tokenizer = cached_tokenizer(data_dir / name)
    api = llama_oracle.api()
    vocab = api.llama_model_get_vocab(llama_oracle.load(data_dir / name, vocab_only=True))
    ours = {
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eos_id,
        "eot": tokenizer.vocabulary.special.get("eot"),
        "fim_pre": tokenizer.fim_prefix_id,
        "fim_suf": tokenizer.fim_suffix_id,
        "fim_mid": tokenizer.fim_middle_id,
    }
    theirs = {role: getattr(api, f"llama_vocab_{role}")(vocab) for role in ours}
    if "qwen2" in name:  # two tokens have an end-of-turn name, and llama.cpp takes either
        assert theirs.pop("eot") in tokenizer.eog_ids
        assert ours.pop("eot") in tokenizer.eog_ids
    assert ours == {role: None if token == -1 else token for role, token in theirs.items()}
    assert tokenizer.add_bos == api.llama_vocab_get_add_bos(vocab)
    assert tokenizer.add_eos == api.llama_vocab_get_add_eos(vocab)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_never_becomes_a_control_token_unasked(data_dir, name):
    tokenizer = cached_tokenizer(data_dir / name)
    controls = [token for token in range(tokenizer.vocab_size) if tokenizer.is_control(token)]
    for token in controls:
        text = tokenizer.decode([token])
        if "tinystories" in name:
            text = _expressible(tokenizer, text)
        unasked = tokenizer.encode(f"a{text}b", add_special=False)
        assert token not in unasked
        if "tinystories" not in name:
            assert tokenizer.encode(f"a{text}b", add_special=False, parse_special=True).count(token) == 1


@pytest.mark.parametrize("name", VOCABULARIES[:-1])
@settings(max_examples=60)
@given(text=TEXTS)
def test_decoding_gives_the_text_back(data_dir, name, text):
    tokenizer = cached_tokenizer(data_dir / name)
    ids = tokenizer.encode(text, add_special=False)
    prefix = " " if "spm" in name or "stories" in name else ""
    spaced = text.replace("▁", " ") if prefix else text
    assert tokenizer.decode(ids) == (prefix + spaced if text else "")


def test_characters_outside_a_vocabulary_without_bytes_are_unknown(data_dir):
    tokenizer = cached_tokenizer(data_dir / "models/gguf/tinystories656K-F32.gguf")
    ids = tokenizer.encode("Once 中 upon 😀 a time", add_special=False)
    assert ids.count(tokenizer.vocabulary.need_unk_id()) == 2
    assert tokenizer.decode(ids, skip_special=True).split() == ["Once", "upon", "a", "time"]


def test_an_open_model_may_be_closed_before_the_first_use(data_dir):
    with open_model(data_dir / "models/src/stories260K.gguf") as model:
        tokenizer = load_tokenizer(model)
    assert tokenizer.encode("Once upon a time") == [1, 403, 407, 261, 378]


def _expressible(tokenizer: Tokenizer, text: str) -> str:
    known = {tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    return "".join(character for character in text if character in known)
