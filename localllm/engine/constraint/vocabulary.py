"""A model's vocabulary in the form that llguidance searches."""

from bisect import bisect_left
from functools import cached_property
from itertools import islice, takewhile
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper


class TokenSource(Protocol):
    """The part of a tokenizer needed here; gguf_io.tokenizer.Tokenizer provides it."""

    vocab_size: int
    eog_ids: frozenset[int]
    bos_id: int | None

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text."""

    def token_bytes(self, token: int, skip_special: bool = False) -> bytes:
        """The bytes that a token adds to a text; with skip_special none for tokens that are not text."""

    def is_control(self, token: int) -> bool:
        """Whether a token steers the model and is not text."""


class ConstraintVocabulary:
    """Built once per model and shared by all its constraints; takes up to a second or two for 150,000 tokens."""

    def __init__(self, tokenizer: TokenSource) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._source = tokenizer
        adapter = _Adapter(tokenizer)
        self._bytes = frozenset(byte for piece in adapter.tokens for byte in piece)
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(adapter), n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.eog_ids)
        )

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a generation."""
        return self._source.eog_ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text, markup included; none if it ends a generation."""
        return b"" if token in self._source.eog_ids else self._source.token_bytes(token)

    def tokens_of(self, text: str) -> list[int]:
        """Tokens that spell a text, not necessarily those that wrote it."""
        return list(self.tokenizer.tokenize_bytes(text.encode())) if text else []

    def beginning_with(self, text: bytes) -> list[int]:
        """The tokens whose bytes begin with a text."""
        tokens = self._sorted
        first = bisect_left(tokens, (text, 0))
        found = takewhile(lambda one: one[0].startswith(text), islice(tokens, first, None))
        return [token for _, token in found]

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((self._source.token_bytes(token), token) for token in range(self.vocab_size))

    def unwritable(self, text: bytes) -> str:
        """The distinct characters of a text that have a byte in no token."""
        characters = dict.fromkeys(text.decode(errors="replace"))
        return "".join(character for character in characters if not self._bytes.issuperset(character.encode()))

    def pieces(self, text: str) -> list[int | str]:
        """The text split into the control tokens that it names, and the text between them."""
        found: list[int | str] = []
        for token in self._source.encode(text, add_special=False, parse_special=True):
            if self._source.is_control(token):
                before, _, text = text.partition(self._source.token_bytes(token).decode())
                found += [before, token]
        return [piece for piece in (*found, text) if piece != ""]


class _Adapter:
    """The attributes and the call that llguidance's TokenizerWrapper expects."""

    def __init__(self, tokenizer: TokenSource) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eog_ids)
        self.bos_token_id = tokenizer.bos_id
        # Byte 255 occurs in no text; llguidance marks control tokens with it.
        self.tokens = [b"" if (data := tokenizer.token_bytes(token)).startswith(b"\xff") else data for token in ids]
        self.special_token_ids = [token for token in ids if not tokenizer.token_bytes(token, skip_special=True)]
        # Some tokenizers put a space before every text. With a newline in front, the text gets none, and the newline
        # does not merge with it.
        spaced = b"".join(self.tokens[token] for token in tokenizer.encode("a", add_special=False)) != b"a"
        self._lead = "\n" if spaced else ""
        self._lead_length = len(tokenizer.encode(self._lead, add_special=False)) if spaced else 0

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text within a longer one, up to the first character that no token can write."""
        ids = self._tokenizer.encode(self._lead + text, add_special=False)[self._lead_length :]
        data, at = text.encode(), 0
        for index, token in enumerate(ids):
            if not data.startswith(self.tokens[token], at):
                return ids[:index]
            at += len(self.tokens[token])
        return ids
