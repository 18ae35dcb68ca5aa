"""Finding special tokens in text, as llama.cpp does: longest tokens first, then from left to right."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from gguf_io.interruption import checkpoint

# isspace() of the C locale.
_SPACE = " \t\n\v\f\r"


class Partition:
    """Splits text into special tokens and the text between them, in about linear time.

    tokens: text to id of the tokens to find. lstrip, rstrip: those that swallow the white space before or after them.
    """

    def __init__(self, tokens: Mapping[str, int], lstrip: Collection[int], rstrip: Collection[int]) -> None:
        self._tokens = tokens
        self._lstrip = lstrip
        self._rstrip = rstrip
        lengths: dict[str, set[int]] = defaultdict(set)
        for text in tokens:
            lengths[text[:2]].add(len(text))
        # By the first two characters of a text: the lengths of the tokens that begin with them, longest first.
        self._lengths = {
            start: sorted(found | lengths.get(start[:1], set()), reverse=True) for start, found in lengths.items()
        }
        firsts = "".join(map(re.escape, {text[0] for text in tokens}))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(
        self,
        text: str,
        literal: Sequence[tuple[int, int]] = (),
    ) -> Iterator[int | str]:
        """Token ids and the non-empty stretches of text around them, in order. Can be interrupted at each token.

        literal: disjoint ascending ranges of the text in which nothing is a token.
        """
        position = 0
        for start, end, token in self._spans(text, literal):
            checkpoint()
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
        for start, length in self._longest(text, 0, len(text)):
            if covered and start < covered[-1][1]:
                covered[-1] = covered[-1][0], max(start + length, covered[-1][1])
            else:
                covered.append((start, start + length))
        return covered

    def _spans(self, text: str, literal: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int | None]]:
        """Disjoint (start, end, token) in order; token None is swallowed space."""
        begin = 0
        for start, end in (*literal, (len(text), len(text))):
            yield from sorted(self._spans_between(text, begin, start))
            begin = end

    def _spans_between(self, text: str, begin: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """The spans within text[begin:end], whose bounds no token may cross.

        A token is taken unless a longer one, or an earlier one of the same length, has taken some of its characters.
        Checking its first and last character is enough: every span taken before is at least as long.
        """
        places: dict[int, list[int]] = defaultdict(list)
        for start, length in self._longest(text, begin, end):
            checkpoint()
            places[length].append(start)
        taken = bytearray(end - begin)
        while places:
            length = max(places)
            for start in sorted(places.pop(length)):
                checkpoint()
                stop = start + length
                if taken[start - begin]:
                    continue
                if taken[stop - 1 - begin]:
                    if shorter := self._length_at(text, start, stop - 1):
                        places[shorter].append(start)
                    continue
                token = self._tokens[text[start:stop]]
                left, right = start, stop
                if token in self._lstrip:
                    while left > begin and text[left - 1] in _SPACE and not taken[left - 1 - begin]:
                        left -= 1
                if token in self._rstrip:
                    while right < end and text[right] in _SPACE and not taken[right - begin]:
                        right += 1
                taken[left - begin : right - begin] = b"\1" * (right - left)
                yield start, stop, token
                if left < start:
                    yield left, start, None
                if right > stop:
                    yield stop, right, None

    def _longest(self, text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """(start, length) of the longest token at each position of text[begin:end] where one begins."""
        if self._first is None:
            return
        for match in self._first.finditer(text, begin, end):
            start = match.start()
            if length := self._length_at(text, start, end):
                yield start, length

    def _length_at(self, text: str, start: int, end: int) -> int:
        """Length of the longest token that begins at `start` and does not reach beyond `end`, 0 for none."""
        for length in self._lengths.get(text[start : start + 2]) or self._lengths.get(text[start]) or ():
            if start + length <= end and text[start : start + length] in self._tokens:
                return length
        return 0
