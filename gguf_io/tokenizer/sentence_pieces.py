"""SentencePiece vocabularies ("llama"): the model file that a GGUF was made from, rebuilt and given to the library.

The message layout is that of sentencepiece_model.proto. Normalisation is llama.cpp's: spaces are kept as they are.
"""

import struct

from sentencepiece import SentencePieceProcessor

from gguf_io.errors import TokenizerError
from gguf_io.tokenizer.special_tokens import BYTE, CONTROL, NORMAL, UNKNOWN
from gguf_io.tokenizer.vocabulary import Vocabulary

_BPE = 2


class SentencePieces:
    """Encodes text without special tokens in it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._unk_id = vocabulary.need_unk_id()
        self._outside = len(vocabulary.tokens)
        self._processor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(_model(vocabulary))
        except RuntimeError as error:
            raise TokenizerError(f"tokenizer.ggml.tokens: {error}. The file is damaged: convert it again.") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of the text. A run of characters that are neither tokens nor bytes here is one unknown token."""
        ids: list[int] = self._processor.EncodeAsIds(text)
        return [self._unk_id if token == self._outside else token for token in ids] if self._outside in ids else ids


def _model(vocabulary: Vocabulary) -> bytes:
    """A ModelProto: pieces in field 1, trainer_spec in 2, normalizer_spec in 3.

    The library's own unknown piece comes after all tokens, for a model's may be an ordinary one. What is not found in
    text counts as control; user-defined tokens merge by score where they were not found whole.
    """
    byte_ids = {vocabulary.ids.get(f"<0x{value:02X}>") for value in range(256)}
    has_bytes = None not in byte_ids
    types = dict.fromkeys(vocabulary.never_text, CONTROL) | dict.fromkeys(byte_ids, BYTE if has_bytes else CONTROL)
    pieces = [
        _field(1, _piece(token, score, types.get(index, NORMAL)))
        for index, (token, score) in enumerate(zip(vocabulary.tokens, vocabulary.scores(), strict=True))
    ]
    pieces.append(_field(1, _piece(f"[outside {len(pieces)}]", 0.0, UNKNOWN)))
    trainer = _number(3, _BPE) + _number(35, has_bytes)
    normalizer = _number(3, False) + _number(4, False) + _number(5, True)
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer)


def _piece(token: str, score: float, kind: int) -> bytes:
    return _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind)


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
