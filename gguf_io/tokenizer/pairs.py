"""A query and a document as the tokens of one text, as rerankers read them."""

import re

from gguf_io.metadata import Metadata
from gguf_io.tokenizer.tokenizer import Tokenizer

_TEMPLATE = "tokenizer.chat_template.rerank"
_PLACES = re.compile(r"\{(query|document)\}")


class Pairs:
    """Encodes pairs by the model's own template, else as BOS query EOS SEP document EOS.

    Adds only the special tokens that the vocabulary requires, as llama.cpp's server does; names of special tokens in
    the texts stay text.
    """

    def __init__(self, metadata: Metadata, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = metadata.get_str(_TEMPLATE, "")

    def encode(self, query: str, document: str) -> list[int]:
        """Token ids of a pair. Raises TokenizerError."""
        if self._template:
            return self._filled({"query": query, "document": document})
        tokenizer = self._tokenizer
        last = tokenizer.sep_id if tokenizer.eos_id is None else tokenizer.eos_id
        begin, end, between = (
            [token] if wanted and token is not None else []
            for token, wanted in (
                (tokenizer.bos_id, tokenizer.add_bos),
                (last, tokenizer.add_eos),
                (tokenizer.sep_id, tokenizer.add_sep),
            )
        )
        first, second = (tokenizer.encode(text, add_special=False) for text in (query, document))
        return [*begin, *first, *end, *between, *second, *end]

    def _filled(self, texts: dict[str, str]) -> list[int]:
        """The template with both texts filled in, as literal text."""
        pieces: list[str] = []
        literal: list[tuple[int, int]] = []
        at = 0
        for index, piece in enumerate(_PLACES.split(self._template)):
            text = texts[piece] if index % 2 else piece
            if index % 2:
                literal.append((at, at + len(text)))
            pieces.append(text)
            at += len(text)
        return self._tokenizer.encode("".join(pieces), add_special=False, parse_special=True, literal=literal)
