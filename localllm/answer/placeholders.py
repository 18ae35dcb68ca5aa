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
from typing import TYPE_CHECKING, Any

from localllm.bounded_json import parsed

if TYPE_CHECKING:  # the chat draws its first screen before NumPy is loaded
    from gguf_io.image_rows import ImagePieces, ImageRows, ReadPicture
    from gguf_io.media import View


Range = tuple[int, int]

NOTE = "note"  # key of an image part: the text that replaces it for models that cannot see images

_NONCE_LETTERS = 24
_INDEX_LETTERS = 4
_LETTERS = "abcdefghijklmnop"


class Placeholders:
    """Replaces the names of control tokens and images, and restores them in rendered text.

    Use one for all renderings of a prompt. rows: runs of image rows by their first id. views: what the model sees of
    each image.
    """

    def __init__(
        self,
        markup: Callable[[str], Sequence[Range]],
        kept: Sequence[str] = (),
        see: "Callable[[Mapping[str, Any]], ReadPicture] | None" = None,
    ) -> None:
        """markup: finds the ranges of a text that name control tokens (Tokenizer.markup). kept: names that are not
        replaced in an assistant's content, since clients send reasoning back with its markers. see: encodes an image.
        """
        self._markup = markup
        self._kept = [text for text in kept if text]
        self._see = see
        self._nonce = _word(secrets.randbits(4 * _NONCE_LETTERS), _NONCE_LETTERS)
        self._hidden: dict[str, str] = {}  # placeholders of names
        self._images: dict[str, ImagePieces] = {}  # by placeholder
        self.rows: dict[int, ImageRows] = {}
        self.views: list[View] = []

    def hide_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Copies of the messages with all names of control tokens replaced, also in names, calls and results.

        Contents with images become text, each part on a line of its own, as in llama.cpp's server. Raises what encoding
        an image raises.
        """
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
        if not self._hidden:
            return rendered, []
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

    def encode(self, rendered: str, encode: Callable[[str, Sequence[Range]], list[int]]) -> tuple[str, tuple[int, ...]]:
        """The text with the names restored, and its token ids, with the images' ids in place of their placeholders.

        encode: called with the text between images, and the ascending ranges in it that are plain text.
        """
        text = ""
        ids: list[int] = []
        for piece in re.split(f"({'|'.join(self._images) or '(?!)'})", rendered):
            if piece in self._images:
                text += piece
                for part in self._images[piece]:
                    ids += part if isinstance(part, tuple) else part.ids
            elif piece:
                plain, ranges = self.reveal(piece)
                text += plain
                ids += encode(plain, ranges)
        return text, tuple(ids)

    def _hide_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        hidden: dict[str, Any] = {}
        for key, value in message.items():
            if key == "content" and isinstance(value, list) and any(map(_is_image, value)):
                value = "\n".join(map(self._line, value))  # noqa: PLW2901
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
                value = parsed(arguments)
            except ValueError:
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
            self._hidden[name] = self._new_placeholder()
        return self._hidden[name]

    def _new_placeholder(self) -> str:
        return self._nonce + _word(len(self._hidden) + len(self._images), _INDEX_LETTERS)

    def _line(self, part: Any) -> str:
        """A part of a content with images, as text."""
        if not _is_image(part) or self._see is None:
            return str(part.get("text", "")) if isinstance(part, Mapping) else str(part)
        placeholder = self._new_placeholder()
        read = self._see(part)
        self._images[placeholder] = read.pieces
        self.rows |= {piece.ids[0]: piece for piece in read.pieces if not isinstance(piece, tuple)}
        self.views.append(read.view)
        return placeholder


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""


def _word(number: int, letters: int) -> str:
    return "".join(_LETTERS[number >> 4 * at & 15] for at in range(letters))


def images_of(messages: Sequence[Any]) -> list[Any]:
    """The parts of a conversation that are images."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return [part for content in contents if isinstance(content, list) for part in content if _is_image(part)]


def has_images(messages: Sequence[Any]) -> bool:
    """Whether a conversation has images."""
    return bool(images_of(messages))


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
