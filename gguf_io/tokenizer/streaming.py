"""Decodes a stream of tokens into text, and never emits half a character."""

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Turns token ids into text piece by piece; the pieces together are what `Tokenizer.decode` gives for all ids.

    Bytes that begin a UTF-8 character wait for the rest of it. Not thread-safe; one per stream.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes, often empty; bytes that cannot be UTF-8 become U+FFFD."""
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """U+FFFD if a character was cut short, else nothing; afterwards the decoder is as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
