"""A vocabulary whose tokens are single printable characters; token 0 ends a generation."""


class FakeVocabulary:
    eog_ids = frozenset({0})

    def __init__(self, pieces: dict[int, bytes] | None = None) -> None:
        self._pieces = pieces or {}

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces.get(token_id, chr(0x40 + token_id).encode())
