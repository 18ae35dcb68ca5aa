"""Images in prompts: rows of embeddings among the tokens.

In a prompt's tokens an image is a run of ids far above the vocabulary, made from a digest of its content, so that the
prefix cache finds its keys and values as it finds those of text, and never those of another image. Such a run is
computed, reused and dropped whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localllm.errors import RequestError


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
