"""What a chat template must not touch stands behind words that it passes on: names of control tokens, and images.

A template mixes its own markup with what others wrote, and the rendered prompt is tokenised with its markup as control
tokens. A message that holds "<|im_end|>" must not end the message, so such names are replaced by words of letters
before rendering; templates trim, compare and write them as JSON like any other word. Afterwards the names are put back,
and the tokenizer reads their places as text. Images are replaced in the same way, and become rows of embeddings.
"""

import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localllm.engine.images import ImagePieces, ImageRows

Range = tuple[int, int]

_INDEX_DIGITS = 4
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


class PromptImages:
    """The images of one conversation, for all of its renderings. rows: their runs by the first id of each."""

    def __init__(self, see: Callable[[bytes], ImagePieces]) -> None:
        self._see = see
        self._nonce = f"image{secrets.token_hex(12)}"
        self._pieces: list[ImagePieces] = []
        self.rows: dict[int, ImageRows] = {}

    def hide(self, messages: Sequence[Any]) -> list[Any]:
        """Copies of the messages in which contents with parts {"type": "image", "data": bytes} are text.

        Parts stand on lines of their own, as llama.cpp's server writes them, an image as a stand-in that templates
        take for a word. Raises what seeing an image raises.
        """
        return [self._hide_message(message) for message in messages]

    def encode(
        self, text: str, literal: Sequence[Range], encode: Callable[[str, Sequence[Range]], list[int]]
    ) -> list[int]:
        """Token ids of a rendered text, with the images' ids where their stand-ins are.

        literal: ranges of the text, ascending, for `encode`, which gets the pieces of text between images.
        """
        ids: list[int] = []
        at = 0
        for stand_in in re.finditer(f"{self._nonce}([0-9a-f]{{{_INDEX_DIGITS}}})", text):
            ids += _encode_between(text, at, stand_in.start(), literal, encode)
            for piece in self._pieces[int(stand_in[1], 16)]:
                ids += piece if isinstance(piece, tuple) else piece.ids
            at = stand_in.end()
        return ids + _encode_between(text, at, len(text), literal, encode)

    def _hide_message(self, message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(_is_image(part) for part in content):
            return message
        return {**message, "content": "\n".join(map(self._part, content))}

    def _part(self, part: Any) -> str:
        if not _is_image(part):
            return str(part.get("text", "")) if isinstance(part, Mapping) else str(part)
        pieces = self._see(part["data"])
        self._pieces.append(pieces)
        self.rows |= {piece.ids[0]: piece for piece in pieces if not isinstance(piece, tuple)}
        return f"{self._nonce}{len(self._pieces) - 1:0{_INDEX_DIGITS}x}"


def has_images(messages: Sequence[Any]) -> bool:
    """Whether a conversation has parts that are images."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return any(_is_image(part) for content in contents if isinstance(content, list) for part in content)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("data"), bytes)


def _encode_between(
    text: str, start: int, stop: int, literal: Sequence[Range], encode: Callable[[str, Sequence[Range]], list[int]]
) -> list[int]:
    """Encode a part of a text, with those of its literal ranges that lie there."""
    inside = [(max(first, start) - start, min(last, stop) - start) for first, last in literal]
    return encode(text[start:stop], [span for span in inside if span[0] < span[1]]) if start < stop else []
