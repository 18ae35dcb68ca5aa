"""Finding special tokens in text, as llama.cpp does: longest tokens first, then from left to right."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence

# isspace() of the C locale.
_SPACE = " \t\n\v\f\r"
_LITERAL = -1


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

    def split(self, text: str, literal: Sequence[tuple[int, int]] = ()) -> Iterator[int | str]:
        """Token ids and the non-empty stretches of text around them, in order.

        literal: disjoint ascending ranges of the text in which nothing is a token.
        """
        position = 0
        for start, end, token in self._spans(text, literal):
            if position < start:
                yield text[position:start]
            if token is not None:
                yield token
            position = end
        if position < len(text):
            yield text[position:]

    def ranges(self, text: str) -> list[tuple[int, int]]:
        """Disjoint ascending ranges that cover every occurrence of every token, overlapping ones as one."""
        covered: list[tuple[int, int]] = []
        for start, end in sorted((start, start - negative_length) for negative_length, start, _ in self._matches(text)):
            if covered and start < covered[-1][1]:
                covered[-1] = covered[-1][0], max(end, covered[-1][1])
            else:
                covered.append((start, end))
        return covered

    def _spans(self, text: str, literal: Sequence[tuple[int, int]]) -> list[tuple[int, int, int | None]]:
        """Disjoint (start, end, token) in order; token None is swallowed space."""
        taken: list[tuple[int, int, int | None]] = [(start, end, _LITERAL) for start, end in literal]
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
        return [span for span in taken if span[2] != _LITERAL]

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
