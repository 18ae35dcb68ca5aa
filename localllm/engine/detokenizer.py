"""Tokens to text that may be shown: whole UTF-8, and nothing that may yet become a stop string."""

import codecs
from collections.abc import Sequence


class Detokenizer:
    """Turns the bytes of one generation's tokens into text, piece by piece.

    The pieces joined are the text of all tokens, cut before the first stop string. Bytes that are not UTF-8 become
    U+FFFD. stopped is the stop string that was found, None until then.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stops = [_StopString(text) for text in stop]
        self._bytes = b""  # the beginning of a character
        self._held = ""
        self.stopped: str | None = None

    @property
    def held(self) -> int:
        """Characters that are kept back, those that are not whole yet left out."""
        return len(self._held)

    def push(self, piece: bytes) -> str:
        """Add one token's bytes; return the text that is now certain. Sets `stopped` at a complete stop string."""
        return self._release(self._decode(piece, False))

    def flush(self) -> str:
        """Return what is still held when the generation ends: it can no longer become a stop string."""
        if self.stopped:
            return ""
        text = self._release(self._decode(b"", True))
        text, self._held = text + self._held, ""
        return text

    def _decode(self, piece: bytes, final: bool) -> str:
        piece = self._bytes + piece
        text, taken = codecs.utf_8_decode(piece, "replace", final)
        self._bytes = piece[taken:]
        return text

    def _release(self, fresh: str) -> str:
        text, begun = self._held + fresh, 0
        cuts = []
        for stop in self._stops:
            end = stop.feed(fresh)
            if end is not None:
                cuts.append((len(self._held) + end - len(stop.text), stop.text))
            begun = max(begun, stop.matched)
        if cuts:
            at, self.stopped = min(cuts)
            self._held = ""
            return text[:at]
        certain = len(text) - begun
        self._held = text[certain:]
        return text[:certain]


class _StopString:
    """Follows how much of a stop string the text ends with, in time linear in the text (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # For each beginning of the string: the longest shorter beginning that it ends with.
        self._shorter = [0] * len(text)
        length = 0
        for at in range(1, len(text)):
            while length and text[at] != text[length]:
                length = self._shorter[length - 1]
            length += text[at] == text[length]
            self._shorter[at] = length

    def feed(self, fresh: str) -> int | None:
        """Add text; return how many characters of it complete the string, None if they do not."""
        text, matched = self.text, self.matched
        if not matched and text[0] not in fresh:
            return None
        for at, character in enumerate(fresh, start=1):
            while matched and text[matched] != character:
                matched = self._shorter[matched - 1]
            matched += text[matched] == character
            if matched == len(text):
                return at
        self.matched = matched
        return None


def beginning_at_end(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of the text that begins one of the markers without being all of it."""
    longest = max((len(marker) - 1 for marker in markers), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0
