"""The smallest vocabulary: one token per letter, and token 0, which ends a generation."""

LETTERS = "abcdefghijk"


class LetterVocabulary:
    bos_id: int | None = None
    eog_ids = frozenset({0})
    vocab_size = len(LETTERS) + 1

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """All other characters are left out."""
        return [LETTERS.index(letter) + 1 for letter in text if letter in LETTERS]

    def token_bytes(self, token: int, skip_special: bool = False) -> bytes:
        return LETTERS[token - 1].encode() if token else b""

    def is_control(self, token: int) -> bool:
        return token == 0
