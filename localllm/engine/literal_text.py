"""What people write stays text: a message that holds "<|im_end|>" must not end the message.

A chat template mixes its own markup with what others wrote, and the rendered prompt is read with its markup as control
tokens. So the names of such tokens are taken out of messages and tools before rendering, a stand-in of letters in the
place of each, which templates trim, compare and write as JSON like any other word. Afterwards the names are put back
and their places remembered, for the tokenizer to read as text.
"""

import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Range = tuple[int, int]

_NONCE_LETTERS = 24
_INDEX_LETTERS = 4
_LETTERS = "abcdefghijklmnop"


class LiteralText:
    """Hides the names of control tokens, and finds them again in rendered text. One for all renderings of a prompt.

    markup: the ranges of a text that name control tokens (Tokenizer.markup). kept: texts that stand for themselves in
    an assistant's content, where clients send reasoning back with its markers, as the model wrote it.
    """

    def __init__(self, markup: Callable[[str], Sequence[Range]], kept: Sequence[str] = ()) -> None:
        self._markup = markup
        self._kept = [text for text in kept if text]
        self._nonce = _word(secrets.randbits(4 * _NONCE_LETTERS), _NONCE_LETTERS)
        self._hidden: dict[str, str] = {}

    def hide_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Copies of the messages whose texts, names, calls and results hold no control token's name."""
        return [self._hide_message(message) if isinstance(message, Mapping) else message for message in messages]

    def hide(self, value: Any) -> Any:
        """A copy of a JSON value, keys included, that holds no control token's name."""
        if isinstance(value, str):
            return self._replace(value, self._markup(value))
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list | tuple) else value

    def reveal(self, rendered: str) -> tuple[str, list[Range]]:
        """The text with the names put back, and their ranges in it, ascending: those are text, whatever they say."""
        pieces: list[str] = []
        ranges: list[Range] = []
        names = {stand_in: name for name, stand_in in self._hidden.items()}
        at = 0
        for piece in re.split(f"({self._nonce}[{_LETTERS}]{{{_INDEX_LETTERS}}})", rendered):
            text = names.get(piece, piece)
            if piece in names:
                ranges.append((at, at + len(text)))
            pieces.append(text)
            at += len(text)
        return "".join(pieces), ranges

    def _hide_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        hidden: dict[str, Any] = {}
        for key, value in message.items():
            if key == "content" and isinstance(value, str):
                hidden[key] = self._replace(value, self._foreign(value, message.get("role")))
            elif key == "content" and isinstance(value, list):
                hidden[key] = self._hide_parts(value, message.get("role"))
            elif key == "tool_calls" and isinstance(value, list):
                hidden[key] = [self._hide_call(call) for call in value]
            else:
                hidden[key] = self.hide(value)
        return hidden

    def _foreign(self, content: str, role: object) -> list[Range]:
        """The ranges of markup that a content may not hold."""
        kept = self._kept if role == "assistant" else []
        allowed = sorted(match.span() for text in kept for match in re.finditer(re.escape(text), content))
        foreign: list[Range] = []
        at = reach = 0  # of the allowed ones that begin no later: how many, and where the farthest ends
        for start, stop in self._markup(content):
            while at < len(allowed) and allowed[at][0] <= start:
                reach = max(reach, allowed[at][1])
                at += 1
            if stop > reach:
                foreign.append((start, stop))
        return foreign

    def _hide_parts(self, parts: list[Any], role: object) -> list[Any]:
        """Templates write parts one behind the other, so that a name may begin in one and end in the next."""
        texts = [_text_of(part) for part in parts]
        ranges = self._foreign("".join(texts), role)
        hidden: list[Any] = []
        at = 0
        for part, text in zip(parts, texts, strict=True):
            end = at + len(text)
            first = bisect_right(ranges, at, key=lambda span: span[1])
            last = bisect_left(ranges, end, key=lambda span: span[0])
            inside = [(max(start, at) - at, min(stop, end) - at) for start, stop in ranges[first:last]]
            plain = self._replace(text, inside)
            at = end
            if isinstance(part, Mapping):
                hidden.append({**self.hide(part), "text": plain} if text else self.hide(part))
            else:
                hidden.append(plain if isinstance(part, str) else part)
        return hidden

    def _hide_call(self, call: Any) -> Any:
        """Arguments may be JSON text, which can spell a name in escapes that reading it undoes."""
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        hidden = self.hide(call)
        if isinstance(arguments, str) and "\\" in arguments:
            try:
                value = json.loads(arguments)
            except (ValueError, RecursionError):
                return hidden
            if (harmless := self.hide(value)) != value:
                hidden["function"]["arguments"] = json.dumps(harmless, ensure_ascii=False)
        return hidden

    def _replace(self, text: str, ranges: Sequence[Range]) -> str:
        pieces: list[str] = []
        at = 0
        for start, stop in ranges:
            pieces += text[at:start], self._stand_in(text[start:stop])
            at = stop
        return "".join([*pieces, text[at:]])

    def _stand_in(self, name: str) -> str:
        if name not in self._hidden:
            self._hidden[name] = self._nonce + _word(len(self._hidden), _INDEX_LETTERS)
        return self._hidden[name]


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""


def _word(number: int, letters: int) -> str:
    return "".join(_LETTERS[number >> 4 * at & 15] for at in range(letters))
