"""Word pieces against BERT's own tokenizer, from whose tokens each vocabulary is written as converters do."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as TheirTokenizer

from gguf_io import load_tokenizer
from gguf_io.tokenizer import Tokenizer
from tests.gguf_io.tokenizer_files import CONTROL, FRAGMENTS, NORMAL, sample_texts, write_vocabulary

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Korean letters as NFD writes them, Devanagari with its signs, Tamil, Thai.
_JAMO = [
    chr(code)
    for first, last in ((0x1100, 0x1112), (0x1161, 0x1175), (0x11A8, 0x11C2))
    for code in range(first, last + 1)
]
_LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFß0123456789", *_JAMO, *"हनदकषािी்தமிழ்ไทยяжé", "\u0e31", "\u093f", "\u094d"]
_SIGNS = [*".,!?()[]#-_'\"$^`~|<=>«»、。", *"中国語日本漢"]
PIECES = list(dict.fromkeys([
    *_SPECIAL, "[unused1]", *_LETTERS, *_SIGNS, *(f"##{letter}" for letter in _LETTERS),
    "the", "rain", "unaffable", "un", "##aff", "##able", "##s", "cafe", "café", "한국", "हिन्दी", "##ing",
]))  # fmt: skip


def theirs(
    pieces: list[str] = PIECES,
    normalizer: dict[str, object] | None = None,
    longest: int = 100,
) -> TheirTokenizer:
    """BERT's tokenizer as its tokenizer.json describes it."""
    rules = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "BertNormalizer", **rules, **(normalizer or {})},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": longest,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
        },
    }
    return TheirTokenizer.from_str(json.dumps(content))


def ours(folder: Path, pieces: list[str] = PIECES, **options: bool | int) -> Tokenizer:
    """The same vocabulary in a file, with "▁" before tokens that begin a word, as llama.cpp's converter writes it."""

    def spelled(piece: str) -> str:
        if piece.startswith("[") and piece.endswith("]"):
            return piece
        return piece[2:] if piece.startswith("##") else f"▁{piece}"

    types = [CONTROL if piece in _SPECIAL else NORMAL for piece in pieces]
    roles = {"bos_token_id": 2, "unknown_token_id": 1, "seperator_token_id": 3}
    tokens = [spelled(piece) for piece in pieces]
    return load_tokenizer(
        write_vocabulary(folder / "words.gguf", tokens, model="bert", types=types, **roles, **options)
    )


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [PIECES[token] for token in tokenizer.encode(text, add_special=False)]


# Spelled out by hand, from the definitions of NFD and of BERT's tokenizer.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("한", ["\u1112", "##\u1161", "##\u11ab"]),
        ("하", ["\u1112", "##\u1161"]),
        ("학생", ["\u1112", "##\u1161", "##\u11a8", "##\u1109", "##\u1162", "##\u11bc"]),
        ("कि", ["क", "##\u093f"]),  # a spacing sign stays
        ("क्", ["क"]),  # a nonspacing one goes
        ("ไทยั", ["ไ", "##ท", "##ย"]),
        ("CAFÉ Café cafe\u0301", ["cafe"] * 3),
        ("I \U0001fae8 you", ["i", "[UNK]", "y", "##o", "##u"]),  # assigned in Unicode 15
        ("a\u0378b a", ["[UNK]", "a"]),  # assigned in no version yet
        ("a\u200bb\u00adc a\x07", ["a", "##b", "##c", "a"]),  # formats and controls
        ("a\ufffdb", ["a", "##b"]),
        ("日本a語", ["日", "本", "a", "語"]),
        ("[unused1] [MASK]", ["[", "un", "##u", "##s", "##e", "##d", "##1", "]", "[", "m", "##a", "##s", "##k", "]"]),
        ("##s", ["#", "#", "s"]),
        ("unaffables unaff", ["unaffable", "##s", "un", "##aff"]),
        ("a" * 100, ["a"] + ["##a"] * 99),
        ("a" * 101, ["[UNK]"]),
        ("the " + "rain" * 30 + " the", ["the", "[UNK]", "the"]),
        ("", []),
        (" \n\u3000\u2003", []),
    ],
)
def test_texts_cut_by_hand(text: str, expected: list[str], tmp_path: Path) -> None:
    assert pieces_of(ours(tmp_path), text) == expected


@pytest.mark.parametrize(
    ("options", "normalizer"),
    [
        ({}, {}),
        ({"normalizer__lowercase": False}, {"lowercase": False}),
        ({"normalizer__strip_accents": False}, {"strip_accents": False}),
        (
            {"normalizer__lowercase": False, "normalizer__strip_accents": True},
            {"lowercase": False, "strip_accents": True},
        ),
        ({"normalizer__clean_text": False}, {"clean_text": False}),
        ({"normalizer__handle_chinese_chars": False}, {"handle_chinese_chars": False}),
    ],
)
def test_every_character_as_in_bert(options: dict[str, bool], normalizer: dict[str, object], tmp_path: Path) -> None:
    pieces = [*PIECES, *(character for text in FRAGMENTS for character in text if character not in PIECES)]
    pieces = list(dict.fromkeys(pieces))
    tokenizer, expected = ours(tmp_path, pieces, **options), theirs(pieces, normalizer)
    codes = [code for code in range(1, 0x30000) if not 0xD800 <= code < 0xE000]
    texts = [*sample_texts(6, 600), *FRAGMENTS]
    texts += ["".join(f"a{chr(code)}b {chr(code)} " for code in codes[at : at + 64]) for at in range(0, len(codes), 64)]
    for text in texts:
        assert tokenizer.encode(text, add_special=False) == expected.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("longest", [3, 100, 300])
def test_a_file_states_its_longest_word(longest: int, tmp_path: Path) -> None:
    tokenizer, expected = ours(tmp_path, max_input_chars_per_word=longest), theirs(longest=longest)
    for size in (2, 3, 4, 100, 101, 300, 301):
        text = f"{'a' * size} the"
        assert tokenizer.encode(text, add_special=False) == expected.encode(text, add_special_tokens=False).ids


def test_control_tokens_are_not_words(tmp_path: Path) -> None:
    path = write_vocabulary(
        tmp_path / "words.gguf",
        ["[CLS]", "[UNK]", "[SEP]", "▁s", "▁stop", "top"],
        model="bert",
        types=[CONTROL, CONTROL, CONTROL, NORMAL, CONTROL, NORMAL],
        unknown_token_id=1,
    )
    assert load_tokenizer(path).encode("stop", add_special=False) == [3, 5]
