"""SentencePiece vocabularies: rebuilds the model file that a GGUF was made from, for the sentencepiece library.

"llama" merges pairs and keeps spaces unchanged, as llama.cpp does. "t5", also used by XLM-RoBERTa and so bge-m3, takes
the likeliest segmentation of a text that was normalised by the file's own rules. The message layout is that of
sentencepiece_model.proto.
"""

import re
import struct
from functools import cached_property

from sentencepiece import SentencePieceProcessor

from gguf_io.errors import DAMAGED, TokenizerError, shortened
from gguf_io.tokenizer.pretokenizers import BEFORE_SPACES, BETWEEN_WORDS, LETTERS
from gguf_io.tokenizer.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, Vocabulary

_UNIGRAM, _BPE = 1, 2
_ONE_BYTE = 0x7F  # the most that a variable-length integer holds in one byte
_FLOAT = struct.Struct("<f")
_ACROSS_WORDS = re.compile(f"[A-Za-z]\u2581|\n[{LETTERS}]")
_CHARACTER_MAP = "tokenizer.ggml.precompiled_charsmap"


class SentencePieces:
    """Encodes text without special tokens in it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._unk_id = vocabulary.need_unk_id()
        self._outside = len(vocabulary.tokens)
        self._processor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(_model(vocabulary))
        except RuntimeError as error:
            raise TokenizerError(f"tokenizer.ggml.tokens: {shortened(error)}. {DAMAGED}") from error

    @cached_property
    def cuts(self) -> re.Pattern[str] | None:
        """Cuts between words, if no token contains the end of one word and the beginning of the next."""
        vocabulary = self._vocabulary
        if "\u2581" not in vocabulary.ids or any(map(_ACROSS_WORDS.search, vocabulary.tokens)):
            return None
        if vocabulary.model != "t5":
            return BETWEEN_WORDS
        # Each piece is normalised separately: a space put in front of it must not be a second one.
        prefix, merged = _spaces(vocabulary)
        return BEFORE_SPACES if merged or not prefix else None

    def encode(self, text: str) -> list[int]:
        """Token ids of the text. A run of characters that are neither tokens nor bytes here is one unknown token."""
        ids: list[int] = self._processor.EncodeAsIds(text)
        return [self._unk_id if token == self._outside else token for token in ids] if self._outside in ids else ids


def _model(vocabulary: Vocabulary) -> bytes:
    """A ModelProto: pieces in field 1, trainer_spec in 2, normalizer_spec in 3.

    The library's own unknown piece comes after all tokens, since the model's may be an ordinary one. Tokens that are
    never found in text count as control.
    """
    unigram = vocabulary.model == "t5"
    types, has_bytes = _unigram_types(vocabulary) if unigram else _merged_types(vocabulary)
    pieces = [
        _piece(token.encode(), score, types.get(index, NORMAL))
        for index, (token, score) in enumerate(zip(vocabulary.tokens, vocabulary.scores(), strict=True))
    ]
    pieces.append(_piece(f"[outside {len(pieces)}]".encode(), 0.0, UNKNOWN))
    trainer = _number(3, _UNIGRAM if unigram else _BPE) + _number(35, has_bytes)
    normalizer = _normalizer(vocabulary) if unigram else _number(3, False) + _number(4, False) + _number(5, True)
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer)


def _merged_types(vocabulary: Vocabulary) -> tuple[dict[int, int], bool]:
    """Types other than normal by id, and whether characters without a token fall back to bytes.

    User-defined tokens that were not found whole merge by score.
    """
    names = [f"<0x{value:02X}>" for value in range(256)]
    byte_ids = [vocabulary.ids[name] for name in names if name in vocabulary.ids]
    has_bytes = len(byte_ids) == len(names)
    kinds = dict.fromkeys(vocabulary.never_text, CONTROL) | dict.fromkeys(byte_ids, BYTE if has_bytes else CONTROL)
    return kinds, has_bytes


def _unigram_types(vocabulary: Vocabulary) -> tuple[dict[int, int], bool]:
    """The same: user-defined tokens have been found already, and there is no byte fallback."""
    hidden = (index for index, kind in enumerate(vocabulary.kinds) if kind not in (NORMAL, UNUSED))
    return dict.fromkeys(hidden, CONTROL), False


def _normalizer(vocabulary: Vocabulary) -> bytes:
    """A NormalizerSpec: character map, leading space, runs of spaces merged into one, and "▁" for each space."""
    metadata = vocabulary.metadata
    characters = b""
    if _CHARACTER_MAP in metadata:
        values = metadata.get_list(_CHARACTER_MAP, int)
        characters = bytes(value & 0xFF for value in values)  # some converters store signed bytes
    prefix, merged = _spaces(vocabulary)
    return _field(2, characters) + _number(3, prefix) + _number(4, merged) + _number(5, True)


def _spaces(vocabulary: Vocabulary) -> tuple[bool, bool]:
    """Whether to put a space in front, and whether to merge runs of spaces into one."""
    prefix = vocabulary.metadata.get_bool("tokenizer.ggml.add_space_prefix", False)
    merged = vocabulary.metadata.get_bool("tokenizer.ggml.remove_extra_whitespaces", False)
    return prefix or merged, merged  # llama.cpp puts a space in front whenever it merges runs


def _piece(token: bytes, score: float, kind: int) -> bytes:
    """A piece as a field of the model."""
    size = len(token) + 9
    if size <= _ONE_BYTE:  # fast path for nearly all tokens
        return b"\n%c\n%c%b\x15%b\x18%c" % (size, len(token), token, _FLOAT.pack(score), kind)
    return _field(1, _field(1, token) + b"\x15" + _FLOAT.pack(score) + _number(3, kind))


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > _ONE_BYTE:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
