"""Images in conversations: a stand-in where a template writes, rows of embeddings where the model reads.

In a prompt's tokens an image is a run of ids far above the vocabulary, made from what the image holds, so that its keys
and values are found again like those of any prefix, and never for another image. Such a run is computed, reused and
dropped whole.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localllm.errors import RequestError

Range = tuple[int, int]

_INDEX_DIGITS = 4


class ImageRows(Protocol):
    """A run of rows of an image. sees_all: they attend to each other in both directions and are computed together."""

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def embeddings(self) -> NDArray[np.float32]: ...

    @property
    def sees_all(self) -> bool: ...


# An image as a model reads it: runs of rows, and ids of tokens before, between and after them.
ImagePieces = Sequence[ImageRows | tuple[int, ...]]


class Projector(Protocol):
    """What turns a picture's file into pieces; any thread may ask."""

    def see(self, data: bytes) -> ImagePieces: ...


@runtime_checkable
class SeesImages(Protocol):
    """What a Runner has beyond others if it reads images; projector is None where the model was loaded without one."""

    @property
    def projector(self) -> Projector | None: ...

    def append_image(self, sequence: int, image: Any) -> None:
        """Append rows that its projector has made to a sequence, as Runner.run appends tokens; no logits come of it."""


class PromptImages:
    """The images of one conversation, through all of its renderings. rows: their runs by the first id of each."""

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


class ImageSpans:
    """Where images lie in a prompt's tokens. rows: runs by their first ids."""

    def __init__(self, tokens: Sequence[int], rows: Mapping[int, ImageRows]) -> None:
        starts = [at for at, token in enumerate(tokens) if token in rows] if rows else []
        self._spans = [(at, at + len(rows[tokens[at]].ids), rows[tokens[at]]) for at in starts]

    def at(self, index: int) -> ImageRows | None:
        """The image that begins at an index."""
        return next((rows for start, _, rows in self._spans if start == index), None)

    def text_end(self, index: int, length: int) -> int:
        """Where the text from an index on ends: at the next image, or at `length`."""
        return min([start for start, _, _ in self._spans if start >= index], default=length)

    def whole(self, length: int) -> int:
        """The longest prefix of at most this length that cuts no image in two."""
        return next((start for start, stop, _ in self._spans if start < length < stop), length)

    def without(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that are text."""
        text: list[int] = []
        at = 0
        for start, stop, _ in self._spans:
            text += tokens[at:start]
            at = stop
        return [*text, *tokens[at:]]


def text_of_prompt(prompt: Sequence[int], rows: Mapping[int, ImageRows]) -> list[int]:
    """The tokens of a prompt that are text. Raises RequestError for images that are not whole, or end the prompt."""
    spans = ImageSpans(prompt, rows)
    for at, token in enumerate(prompt):
        if token in rows and tuple(prompt[at : at + len(rows[token].ids)]) != rows[token].ids:
            raise RequestError("An image of the prompt is not whole.")
    if prompt and spans.whole(len(prompt) - 1) != len(prompt) - 1:
        raise RequestError("The prompt ends with an image. Let text follow it.")
    return spans.without(prompt)


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
