"""Finding special tokens in text, as llama.cpp does: longest tokens first, then from left to right."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping

# isspace() of the C locale.
_SPACE = " \t\n\v\f\r"


class Partition:
    """Cuts text into special tokens and what lies between them.

    tokens: text to id of the tokens to find. lstrip, rstrip: those that swallow the white space before or after them.
    """

    def __init__(self, tokens: Mapping[str, int], lstrip: Collection[int], rstrip: Collection[int]) -> None:
        self._tokens = tokens
        self._lstrip = lstrip
        self._rstrip = rstrip
        lengths: dict[str, set[int]] = {}
        for text in tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found) for first, found in lengths.items()}
        self._first = re.compile("[" + "".join(map(re.escape, lengths)) + "]") if lengths else None

    def split(self, text: str) -> Iterator[int | str]:
        """Token ids and the non-empty stretches of text around them, in order."""
        position = 0
        for start, end, token in self._spans(text):
            if position < start:
                yield text[position:start]
            if token is not None:
                yield token
            position = end
        if position < len(text):
            yield text[position:]

    def _spans(self, text: str) -> list[tuple[int, int, int | None]]:
        """Disjoint (start, end, token) in order; token None is swallowed space."""
        taken: list[tuple[int, int, int | None]] = []
        for negative_length, start, token in sorted(self._matches(text)):
            end = start - negative_length
            index = bisect_left(taken, (start,))
            floor = taken[index - 1][1] if index else 0
            ceiling = taken[index][0] if index < len(taken) else len(text)
            if start < floor or end > ceiling:
                continue
            spans: list[tuple[int, int, int | None]] = [(start, end, token)]
            if token in self._lstrip and (left := floor + len(text[floor:start].rstrip(_SPACE))) < start:
                spans.insert(0, (left, start, None))
            if token in self._rstrip and (right := ceiling - len(text[end:ceiling].lstrip(_SPACE))) > end:
                spans.append((end, right, None))
            taken[index:index] = spans
        return taken

    def _matches(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(minus length, start, id) of every occurrence of every token, overlapping ones too."""
        if self._first is None:
            return
        for match in self._first.finditer(text):
            start = match.start()
            for length in self._lengths[text[start]]:
                token = self._tokens.get(text[start : start + length])
                if token is not None and start + length <= len(text):
                    yield -length, start, token
