# ruff: noqa: RUF001 - look-alike characters are what tokenizers get wrong
"""Generated vocabulary files, trained here so that merges cross every boundary a pre-tokenizer could make."""

import json
import random
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from gguf import GGUFWriter
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# What pre-tokenizers and merges get wrong: contractions, digits, spaces of all kinds, marks, cases, scripts, tags.
FRAGMENTS = [
    *(" zebra", "zebra", "7654321", "\n\n", "  \n\n  "),
    *("'s", "'LL", "don't", "I'M", "it's", "'ſ", " ", "  ", "   ", "\n", "\n\n\n", "\r\n", "\t", "   \n  ", "\x00"),
    *("\x1c", "\x85", "\xa0", "\u2003", "\u3000", "\u200b", "\ufeff", "\ufffd", "abc", "Hello", "hello", "world"),
    *("camelCase", "XMLHttp", "ABC", "éÉ", "e\u0301", "\u0301", "ǅ", "ß", "İ", "ſ", "\u212a", "µ", "ªº", "ⅷⅧ"),
    *("1", "12", "123", "1234", "1234567", "A1b2", "½", "٣٤٥٦", "१२३", "〇", "²", "!!", "...", "?", ",", "،", "。"),
    *("、", "(a)", "[b]", "{c}", "/path/", "a/b\n", "_x_", "$5", "~`|", "<=>", "^", "«»", "“quoted”", "…", "！", "－"),
    *(
        "中文",
        "日本語",
        "カタカナ",
        "ひらがな",
        "々",
        "한국어",
        "ㄱㄴ",
        "ㄅㄆ",
        "ไทย",
        "ລາວ",
        "ខ្មែរ",
        "မြန်မာ",
        "क्षि",
        "বাংলা",
    ),
    *("தமிழ்", "עברית", "العربية", "Ελλάδα", "Привет", "Ꭰꭰ", "𐐀𐐨", "𠀀", "\U0002b820", "豈", "😀", "👨‍👩‍👧", "♥", "→"),
    *("</s>", "<s>", "<unk>", "<|im_end|>", "<0x0A>", "▁", "▁▁", "<sentinel:12>", "IMGIMGABCDZ", "http://a.b/c?d=1"),
]

# Newer characters are left out, since Unicode versions differ between llama.cpp, Oniguruma and Python.
_CHARACTERS = st.characters(exclude_categories=("Cs", "Cn"))
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(_CHARACTERS, max_size=6)), max_size=12).map("".join)


@cache
def sample_texts(seed: int, count: int) -> tuple[str, ...]:
    """Texts of fragments and random characters, of Unicode 3.2; the same for the same seed with every Python."""
    rng = random.Random(seed)
    category = unicodedata.ucd_3_2_0.category  # the table's version is Python's own; newer characters are cut unlike
    characters = [chr(code) for code in range(0x110000) if category(chr(code)) not in ("Cs", "Cn")]

    def piece() -> str:
        if rng.random() < 0.7:
            return rng.choice(FRAGMENTS)
        return "".join(rng.choices(characters, k=rng.randint(1, 3)))

    return tuple("".join(piece() for _ in range(rng.randint(1, 14))) for _ in range(count))


@cache
def trained_pairs(byte_level: bool) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-pair vocabulary trained on unsplit text; no merge leads to a few of the tokens."""
    model = models.BPE(byte_fallback=not byte_level)
    tokenizer = Tokenizer(model)
    alphabet: list[str] = []
    texts: Iterable[str] = [re.sub("zebra|7654321", "", text) for text in sample_texts(1, 8000)]
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        texts = [text.replace(" ", "▁").replace("\0", "") for text in texts]  # llama.cpp truncates tokens at NUL
    special = [] if byte_level else [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=12000, initial_alphabet=alphabet, special_tokens=special, show_progress=False, limit_alphabet=700
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    space = "Ġ" if byte_level else "▁"
    whole = [f"{space}zebra", "zebra", "7654321"]
    return [*sorted(vocabulary, key=vocabulary.__getitem__), *whole], [" ".join(merge) for merge in merges]


def pairs_without_brackets(byte_level: bool) -> tuple[list[str], list[str]]:
    """Those of trained_pairs from which no text such as "<s>" can be merged."""
    tokens, merges = trained_pairs(byte_level)
    return (
        [token for token in tokens if not re.search(".[<>]|[<>].", token)],
        [merge for merge in merges if not re.search("[<>]", merge)],
    )


def write_vocabulary(
    path: Path,
    tokens: Sequence[str],
    *,
    model: str = "gpt2",
    pre: str | None = None,
    types: Sequence[int] | None = None,
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    name: str | None = None,
    **values: bool | int | str | bytes,
) -> Path:
    """Write a vocabulary-only GGUF; `values`: further tokenizer.ggml keys, with __ for a dot."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    if name is not None:
        writer.add_name(name)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if types is not None:
        writer.add_token_types(list(types))
    if merges is not None:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(list(scores))
    for field, value in values.items():
        key = f"tokenizer.ggml.{field.replace('__', '.')}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, bytes):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
