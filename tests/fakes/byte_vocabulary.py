"""A vocabulary of bytes and a few longer pieces, for constraints without a model; token 0 ends a generation."""

from collections.abc import Sequence

END = 0


class ByteVocabulary:
    bos_id: int | None = None
    eog_ids = frozenset({END})

    def __init__(self, pieces: Sequence[bytes] = (), lacking: bytes = b"") -> None:
        """pieces: tokens of several bytes. lacking: bytes that no token has."""
        single = [bytes([value]) for value in range(256) if value not in lacking]
        self.tokens = [b"", *single, *pieces]
        self.vocab_size = len(self.tokens)
        self._longest_first = sorted(range(1, self.vocab_size), key=lambda token: -len(self.tokens[token]))

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Longest piece first; bytes without a token are left out."""
        data, at, ids = text.encode(), 0, []
        while at < len(data):
            token = next((token for token in self._longest_first if data.startswith(self.tokens[token], at)), None)
            if token is not None:
                ids.append(token)
            at += len(self.tokens[token]) if token is not None else 1
        return ids

    def token_bytes(self, token: int, skip_special: bool = False) -> bytes:
        return self.tokens[token]

    def is_control(self, token: int) -> bool:
        return token == END
