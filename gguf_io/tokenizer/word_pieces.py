"""Word pieces ("bert"): words by character class, then the longest tokens from the left.

The rules are llama.cpp's. Its vocabularies write "▁" before tokens that begin a word, where the original writes "##"
before those that do not.
"""

import unicodedata

from gguf_io.tokenizer.pretokenizers import BETWEEN_WORDS
from gguf_io.tokenizer.vocabulary import Vocabulary

# Ideographs are words of their own.
_IDEOGRAPHS = (
    range(0x4E00, 0xA000),
    range(0x3400, 0x4DC0),
    range(0x20000, 0x2A6E0),
    range(0x2A700, 0x2B740),
    range(0x2B740, 0x2B820),
    range(0x2B920, 0x2CEB0),
    range(0xF900, 0xFB00),
    range(0x2F800, 0x2FA20),
)


class WordPieces:
    """Encodes text without special tokens in it; a word that tokens cannot spell is one unknown token."""

    cuts = BETWEEN_WORDS

    def __init__(self, vocabulary: Vocabulary) -> None:
        get_bool = vocabulary.metadata.get_bool
        self._ids = vocabulary.ids
        self._unk_id = vocabulary.need_unk_id()
        self._lengths = sorted({len(token) for token in vocabulary.ids}, reverse=True)
        self._lowercase = get_bool("tokenizer.ggml.normalizer.lowercase", True)
        self._strip_accents = get_bool("tokenizer.ggml.normalizer.strip_accents", self._lowercase)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._words(text):
            ids += self._pieces("\u2581" + word)
        return ids

    def _pieces(self, word: str) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(word):
            for length in self._lengths:
                token = self._ids.get(word[start : start + length]) if length <= len(word) - start else None
                if token is not None:
                    ids.append(token)
                    start += length
                    break
            else:
                return [self._unk_id]
        return ids

    def _words(self, text: str) -> list[str]:
        """Words, lower-cased and without accents if the file says so; signs and ideographs are words of their own."""
        words: list[str] = []
        word = ""
        for character in text:
            base = unicodedata.normalize("NFD", character)[0] if self._strip_accents else character
            category = unicodedata.category(base)
            if category[0] == "Z" or base in "\t\n\v\f\r\x85":
                words.append(word)
                word = ""
            elif base == "\ufffd" or category[0] == "C" or (self._strip_accents and category[0] == "M"):
                continue
            else:
                lowered = base.lower()[0] if self._lowercase else base
                if category[0] == "P" or (category[0] == "S" and base < "\x7f") or _is_ideograph(base):
                    words += [word, lowered]
                    word = ""
                else:
                    word += lowered
        words.append(word)
        return [word for word in words if word]


def _is_ideograph(character: str) -> bool:
    code = ord(character)
    return any(code in block for block in _IDEOGRAPHS)
