"""Images in prompts: rows of embeddings among the tokens.

In a prompt's tokens an image is a run of ids far above the vocabulary, derived from a digest of its content, so that
the prefix cache works for images as for text. Such a run is computed, reused and evicted as a whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localllm.errors import RequestError


class ImageRows(Protocol):
    """A run of an image's rows. sees_all: they attend to each other in both directions and form one batch."""

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def embeddings(self) -> NDArray[np.float32]: ...

    @property
    def sees_all(self) -> bool: ...


# An encoded image: runs of rows, and token ids before, between and after them.
ImagePieces = Sequence[ImageRows | tuple[int, ...]]


class Projector(Protocol):
    """Encodes images. Thread-safe."""

    def see(self, data: bytes) -> ImagePieces: ...


@runtime_checkable
class SeesImages(Protocol):
    """The additional interface of a Runner that reads images. projector: None if the model was loaded without one."""

    @property
    def projector(self) -> Projector | None: ...

    def append_image(self, sequence: int, image: Any) -> None:
        """Append rows from the projector to a sequence, as Runner.run appends tokens, without logits."""


class ImageSpans:
    """The positions of images in a prompt's tokens. rows: runs by their first ids."""

    def __init__(self, tokens: Sequence[int], rows: Mapping[int, ImageRows]) -> None:
        starts = [at for at, token in enumerate(tokens) if token in rows] if rows else []
        self._spans = [(at, at + len(rows[tokens[at]].ids), rows[tokens[at]]) for at in starts]

    def at(self, index: int) -> ImageRows | None:
        """The image that starts at an index, if any."""
        return next((rows for start, _, rows in self._spans if start == index), None)

    def text_end(self, index: int, length: int) -> int:
        """The end of the text from an index on: the next image, or `length`."""
        return min([start for start, _, _ in self._spans if start >= index], default=length)

    def whole(self, length: int) -> int:
        """The longest prefix of at most this length that does not split an image."""
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
    """The tokens of a prompt that are text. Raises RequestError for incomplete images, and an image at the end."""
    spans = ImageSpans(prompt, rows)
    for at, token in enumerate(prompt):
        if token in rows and tuple(prompt[at : at + len(rows[token].ids)]) != rows[token].ids:
            raise RequestError("An image of the prompt is incomplete.")
    if prompt and spans.whole(len(prompt) - 1) != len(prompt) - 1:
        raise RequestError("The prompt ends with an image. Add text after it.")
    return spans.without(prompt)
