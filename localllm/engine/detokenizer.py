"""Tokens to text that may be shown: whole UTF-8, and nothing that may yet turn out to be a stop string."""

import codecs
from collections.abc import Sequence


class Detokenizer:
    """Turns the bytes of one generation's tokens into text, piece by piece.

    The pieces joined are the text of all tokens, cut before the first stop string. Bytes that are not UTF-8 become
    U+FFFD. stopped is the stop string that was found, None as long as there is none.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._bytes = b""  # the beginning of a character
        self._held = ""
        self.stopped: str | None = None

    @property
    def held(self) -> int:
        """Characters that are kept back, those that are not whole yet left out."""
        return len(self._held)

    def push(self, piece: bytes) -> str:
        """Add one token's bytes; return the text that is now certain. Sets `stopped` at a complete stop string."""
        self._decode(piece, False)
        return self._release()

    def flush(self) -> str:
        """Return what is still held when the generation ends: it can no longer become a stop string."""
        if self.stopped:
            return ""
        self._decode(b"", True)
        text = self._release()
        text, self._held = text + self._held, ""
        return text

    def _decode(self, piece: bytes, final: bool) -> None:
        piece = self._bytes + piece
        text, taken = codecs.utf_8_decode(piece, "replace", final)
        self._bytes = piece[taken:]
        self._held += text

    def _release(self) -> str:
        if not self._stop:
            text, self._held = self._held, ""
            return text
        cuts = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if cuts:
            at, self.stopped = min(cuts)
            text, self._held = self._held[:at], ""
            return text
        certain = len(self._held) - beginning_at_end(self._held, self._stop)
        text, self._held = self._held[:certain], self._held[certain:]
        return text


def beginning_at_end(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of the text that begins one of the markers without being all of it."""
    longest = max((len(marker) - 1 for marker in markers), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0
