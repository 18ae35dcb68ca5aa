"""Vocabularies of T5's kind, trained here with a character map, compared with llama.cpp's tokenizer."""

import io
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from gguf_io import load_tokenizer
from tests.gguf_io.tokenizer_files import (
    CONTROL,
    FRAGMENTS,
    NORMAL,
    TEXTS,
    UNKNOWN,
    USER_DEFINED,
    write_vocabulary,
)
from tests.oracle import llama_oracle

# As in T5, and as in XLM-RoBERTa and so in bge-m3.
KINDS = {
    "t5": {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": False, "add_space_prefix": True},
    "xlm": {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True, "add_space_prefix": True},
    "bare": {"bos_token_id": 0, "eos_token_id": 1, "add_eos_token": False},
    "merging": {"bos_token_id": 0, "eos_token_id": 1},
}
MERGING = {"t5", "xlm", "merging"}
SPECIAL = {"<extra_id_0>": USER_DEFINED, "<mask>": CONTROL}

cached_tokenizer = cache(load_tokenizer)


def fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 2:
            length = varint()
            yield key >> 3, data[at : at + length]
            at += length
        elif key & 7 == 0:
            varint()
        else:
            at += {1: 8, 5: 4}[key & 7]


@cache
def trained() -> tuple[list[str], list[float], bytes]:
    """Pieces, their scores, and the character map (NFKC, with white space as spaces)."""
    written, chance = io.BytesIO(), random.Random(11)
    texts = ("".join(chance.choices(FRAGMENTS, k=8)).replace("\0", "") for _ in range(1500))
    SentencePieceTrainer.Train(
        sentence_iterator=texts,
        model_writer=written,
        vocab_size=900,
        model_type="unigram",
        normalization_rule_name="nmt_nfkc",
        character_coverage=0.99,
        hard_vocab_limit=False,
        bos_id=0,
        eos_id=1,
        unk_id=2,
        num_threads=1,
        minloglevel=2,
    )
    model = written.getvalue()
    processor = SentencePieceProcessor(model_proto=model)
    ids = range(processor.GetPieceSize())
    normalizer = next(content for number, content in fields(model) if number == 3)
    characters = next(content for number, content in fields(normalizer) if number == 2)
    return [processor.IdToPiece(each) for each in ids], [processor.GetScore(each) for each in ids], characters


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("unigram")
    tokens, scores, characters = trained()
    types = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * (len(tokens) - 3), *SPECIAL.values()]
    return {
        kind: write_vocabulary(
            folder / f"{kind}.gguf",
            [*tokens, *SPECIAL],
            model="t5",
            types=types,
            scores=[*scores, 0.0, 0.0],
            unknown_token_id=2,
            precompiled_charsmap=characters,
            remove_extra_whitespaces=kind in MERGING,
            **options,
        )
        for kind, options in KINDS.items()
    }


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120)
@given(
    text=st.one_of(TEXTS, st.lists(st.sampled_from([*SPECIAL, " ", "  ", "\n", "a", "ﬁ", "hello "])).map("".join)),
    parse_special=st.booleans(),
)
def test_the_likeliest_cut(files: dict[str, Path], kind: str, text: str, parse_special: bool) -> None:
    expected = llama_oracle.tokenize(files[kind], text, parse_special=parse_special)
    assert cached_tokenizer(files[kind]).encode(text, True, parse_special) == expected


def test_a_user_defined_token_stays_text_where_it_must(files: dict[str, Path]) -> None:
    tokenizer = cached_tokenizer(files["xlm"])
    sentinel = len(trained()[0])
    assert sentinel in tokenizer.encode("a <extra_id_0>")
    assert sentinel not in tokenizer.encode("a <extra_id_0>", literal=[(2, 14)])


def test_text_comes_back_normalised(files: dict[str, Path]) -> None:
    tokenizer = cached_tokenizer(files["t5"])
    ids = tokenizer.encode("  don't\t hello  world ", add_special=False)
    assert tokenizer.decode(ids) == " don't hello world"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos, tokenizer.add_eos) == (0, 1, False, True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_pieces_has_the_same_tokens(
    files: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    words = [text.replace("\0", "") for text in FRAGMENTS]
    texts = [" ".join(f"a{''.join(chance.choices(words, k=3))}z" for _ in range(8)) for _ in range(200)]
    tokenizer = cached_tokenizer(files[kind])
    whole = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr("gguf_io.tokenizer.tokenizer._PIECE", 0)
    assert len(list(tokenizer.pieces(texts[0]))) >= 8
    assert [tokenizer.encode(text) for text in texts] == whole
