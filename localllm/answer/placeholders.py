"""Placeholders for what a chat template must pass through unchanged: names of control tokens in messages, and images.

A rendered prompt is tokenised with the template's markup as control tokens. A message that contains "<|im_end|>" must
not end the message, so such names are replaced by random words before rendering, which templates trim, compare and
quote like any other word. Afterwards the names are restored and tokenised as plain text. Images are replaced in the
same way, and become rows of embeddings.
"""

import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localllm.engine.runner import ImagePieces, ImageRows

Range = tuple[int, int]

NOTE = "note"  # key of an image part: the text that replaces it for models that cannot see images

_INDEX_DIGITS = 4
_NONCE_LETTERS = 24
_INDEX_LETTERS = 4
_LETTERS = "abcdefghijklmnop"


class LiteralText:
    """Replaces the names of control tokens, and restores them in rendered text. Use one for all renderings of a prompt.

    markup: finds the ranges of a text that name control tokens (Tokenizer.markup). kept: names that are not replaced in
    an assistant's content, since clients send reasoning back with its markers.
    """

    def __init__(self, markup: Callable[[str], Sequence[Range]], kept: Sequence[str] = ()) -> None:
        self._markup = markup
        self._kept = [text for text in kept if text]
        self._nonce = _word(secrets.randbits(4 * _NONCE_LETTERS), _NONCE_LETTERS)
        self._hidden: dict[str, str] = {}

    def hide_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Copies of the messages with all names of control tokens replaced, also in names, calls and results."""
        return [self._hide_message(message) if isinstance(message, Mapping) else message for message in messages]

    def hide(self, value: Any) -> Any:
        """A copy of a JSON value with all names of control tokens replaced, also in keys."""
        if isinstance(value, str):
            return self._replace(value, self._markup(value))
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list | tuple) else value

    def reveal(self, rendered: str) -> tuple[str, list[Range]]:
        """The text with the names restored, and their ascending ranges in it, which are plain text."""
        pieces: list[str] = []
        ranges: list[Range] = []
        names = {placeholder: name for name, placeholder in self._hidden.items()}
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
        """The ranges of a content that must be replaced."""
        kept = self._kept if role == "assistant" else []
        allowed = sorted(match.span() for text in kept for match in re.finditer(re.escape(text), content))
        foreign: list[Range] = []
        at = reach = 0  # of the allowed ranges that start no later: their count and the largest end
        for start, stop in self._markup(content):
            while at < len(allowed) and allowed[at][0] <= start:
                reach = max(reach, allowed[at][1])
                at += 1
            if stop > reach:
                foreign.append((start, stop))
        return foreign

    def _hide_parts(self, parts: list[Any], role: object) -> list[Any]:
        """Hide names in parts as if they were one text: templates concatenate them, so a name may span two."""
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
        """Arguments may be JSON text whose escapes spell a name; names are then replaced in the parsed value."""
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
            pieces += text[at:start], self._placeholder(text[start:stop])
            at = stop
        return "".join([*pieces, text[at:]])

    def _placeholder(self, name: str) -> str:
        if name not in self._hidden:
            self._hidden[name] = self._nonce + _word(len(self._hidden), _INDEX_LETTERS)
        return self._hidden[name]


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""


def _word(number: int, letters: int) -> str:
    return "".join(_LETTERS[number >> 4 * at & 15] for at in range(letters))


class PromptImages:
    """The images of a conversation, for all of its renderings. rows: runs of image rows by their first id."""

    def __init__(self, see: Callable[[bytes], ImagePieces]) -> None:
        self._see = see
        self._nonce = f"image{secrets.token_hex(12)}"
        self._pieces: list[ImagePieces] = []
        self.rows: dict[int, ImageRows] = {}

    def hide(self, messages: Sequence[Any]) -> list[Any]:
        """Copies of the messages in which contents with images are text, with placeholders for the images.

        Each part is on a line of its own, as in llama.cpp's server. Raises what encoding an image raises.
        """
        return [self._hide_message(message) for message in messages]

    def encode(
        self, text: str, literal: Sequence[Range], encode: Callable[[str, Sequence[Range]], list[int]]
    ) -> list[int]:
        """Token ids of a rendered text, with the images' ids in place of their placeholders.

        literal: ranges of the text, ascending. encode: called with the text between images and the ranges in it.
        """
        ids: list[int] = []
        at = 0
        for placeholder in re.finditer(f"{self._nonce}([0-9a-f]{{{_INDEX_DIGITS}}})", text):
            ids += _encode_between(text, at, placeholder.start(), literal, encode)
            for piece in self._pieces[int(placeholder[1], 16)]:
                ids += piece if isinstance(piece, tuple) else piece.ids
            at = placeholder.end()
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
    """Whether a conversation has images."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return any(_is_image(part) for content in contents if isinstance(content, list) for part in content)


def without_images(messages: Sequence[Mapping[str, Any]], most: int | None = None) -> list[Mapping[str, Any]]:
    """Copies of the messages with images replaced by their notes: the oldest `most`, or all that have a note."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    noted = [part for content in contents for part in content if _is_image(part) and NOTE in part]
    replaced = set(map(id, noted[:most]))
    found: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list) or replaced.isdisjoint(map(id, content)):
            found.append(message)
            continue
        parts = [{"type": "text", "text": part[NOTE]} if id(part) in replaced else part for part in content]
        is_text = all(part.get("type") == "text" for part in parts)
        found.append({**message, "content": "\n".join(part["text"] for part in parts) if is_text else parts})
    return found


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("data"), bytes)


def _encode_between(
    text: str, start: int, stop: int, literal: Sequence[Range], encode: Callable[[str, Sequence[Range]], list[int]]
) -> list[int]:
    """Encode a part of a text with the literal ranges in it."""
    inside = [(max(first, start) - start, min(last, stop) - start) for first, last in literal]
    return encode(text[start:stop], [span for span in inside if span[0] < span[1]]) if start < stop else []
