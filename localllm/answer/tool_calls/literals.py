"""Reading arguments that are spelled otherwise than JSON: Python's literals and Gemma's."""

import json
import re
from typing import Any

from localllm.answer.tool_calls.formats import Literals

_BLANKS = re.compile(r"\s*")
_KEY = re.compile(r"[^\s\"'=:{}\[\](),]+")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)


class _IncompleteError(Exception):
    """The text ends too early, or is none of these values."""


def read_pairs(text: str, at: int, spelling: Literals) -> tuple[dict[str, Any], int] | None:
    """The pairs up to the end of the arguments, and where they end. None if they are not complete or not valid."""
    try:
        return _Reader(text, spelling).pairs(at, spelling.assigns, spelling.closing, quoted=False)
    except (_IncompleteError, ValueError, RecursionError):
        return None


class _Reader:
    def __init__(self, text: str, spelling: Literals) -> None:
        self._text = text
        self._spelling = spelling
        self._words = dict(zip(spelling.words, (True, False, None), strict=True))

    def pairs(self, at: int, assigns: str, closing: str, quoted: bool) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self._blank(at)
        while not self._text.startswith(closing, at):
            if found:
                at = self._blank(self._expect(",", at))
            if quoted:
                key, at = self._string(at)
            else:
                match = self._matched(_KEY, at)
                key, at = match[0], match.end()
            at = self._blank(self._expect(assigns, self._blank(at)))
            found[key], at = self.value(at)
            at = self._blank(at)
        return found, at

    def value(self, at: int) -> tuple[Any, int]:
        text, spelling = self._text, self._spelling
        if text.startswith(spelling.quotes, at):
            return self._string(at)
        if text.startswith("{", at):
            found, at = self.pairs(at + 1, spelling.nested_assigns, "}", spelling.quoted_keys)
            return found, at + 1
        if text.startswith("[", at):
            return self._items(at + 1)
        for word, value in self._words.items():
            if text.startswith(word, at):
                return value, at + len(word)
        match = self._matched(_NUMBER, at)
        return json.loads(match[0]), match.end()

    def _items(self, at: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = self._blank(at)
        while not self._text.startswith("]", at):
            if found:
                at = self._blank(self._expect(",", at))
            value, at = self.value(at)
            found.append(value)
            at = self._blank(at)
        return found, at + 1

    def _string(self, at: int) -> tuple[str, int]:
        quotes = self._spelling.quotes
        if quotes == '"':
            match = self._matched(_STRING, at)
            return json.loads(match[0]), match.end()
        first = self._expect(quotes, at)
        end = self._text.find(quotes, first)
        if end < 0:
            raise _IncompleteError
        return self._text[first:end], end + len(quotes)

    def _blank(self, at: int) -> int:
        match = _BLANKS.match(self._text, at)
        return match.end() if match else at

    def _expect(self, text: str, at: int) -> int:
        if not self._text.startswith(text, at):
            raise _IncompleteError
        return at + len(text)

    def _matched(self, expression: "re.Pattern[str]", at: int) -> "re.Match[str]":
        match = expression.match(self._text, at)
        if match is None:
            raise _IncompleteError
        return match
