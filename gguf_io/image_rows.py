"""Rows of an image, as a projector makes them, and the positions that a model gives them.

Most models number an image's rows like tokens. Those with M-RoPE (Qwen2-VL and its successors) position them in time,
height and width, and continue after the image as if it took as many positions as its longer side.
Source: mtmd_image_tokens_get_decoder_pos and mtmd_input_chunk_get_n_pos (tools/mtmd/mtmd.cpp in llama.cpp).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gguf_io.media import Size, View

_PLACEHOLDER = 1 << 62  # ids of image rows are above it, far above every token id


@dataclass(frozen=True, slots=True, eq=False)
class ImageGrid:
    """Positions of an image's rows in several dimensions.

    places: int32[dimensions, rows], for an image that begins at position 0. moves: int32[dimensions], 1 where a
    dimension is relative to the image's first position, else 0. count: positions that the image takes.
    """

    places: NDArray[np.int32]
    moves: NDArray[np.int32]
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """Consecutive rows of an image. ids: stand in for token ids, and differ between images.

    embeddings: float32[len(ids), width]. sees_all: whether rows attend to each other in both directions, so that they
    must be computed in one pass. grid: None if rows are numbered like tokens.
    """

    ids: tuple[int, ...]
    embeddings: NDArray[np.float32]
    sees_all: bool
    grid: ImageGrid | None = None

    @property
    def length(self) -> int:
        """How many positions the rows take."""
        return len(self.ids) if self.grid is None else self.grid.count

    def positions(self, first: int, start: int, stop: int) -> NDArray[np.int32]:
        """Positions of rows start..stop-1 of an image that begins at `first`, one dimension after another."""
        if self.grid is None:
            return np.arange(first + start, first + stop, dtype=np.int32)
        return (self.grid.places[:, start:stop] + self.grid.moves[:, None] * np.int32(first)).ravel()


# An image in a prompt: runs of rows, with the ids of tokens before, between and after them.
ImagePieces = tuple[ImageRows | tuple[int, ...], ...]
# The same as a projector makes it, which may not know ids: texts stand for their tokens, special ones included.
SeenPieces = tuple[ImageRows | tuple[int, ...] | str, ...]


class SeenPicture(NamedTuple):
    """What a projector makes of a picture. resized, tiles: as in PictureView."""

    pieces: SeenPieces
    resized: Size | None = None
    tiles: tuple[int, int] = (1, 1)


class ReadPicture(NamedTuple):
    """A picture or a sound in a prompt, and what the model sees or hears of it."""

    pieces: ImagePieces
    view: View


class ImageSpans:
    """The positions of images in a prompt's tokens. rows: runs by their first ids."""

    def __init__(self, tokens: Sequence[int], rows: Mapping[int, ImageRows]) -> None:
        starts = [at for at, token in enumerate(tokens) if token in rows] if rows else []
        self._spans = [(at, at + len(rows[tokens[at]].ids), rows[tokens[at]]) for at in starts]

    def at(self, index: int) -> ImageRows | None:
        """The image that starts at an index, or None."""
        return next((rows for start, _, rows in self._spans if start == index), None)

    def text_end(self, index: int, length: int) -> int:
        """The end of the text that starts at an index: the start of the next image, at most `length`."""
        return min([length, *(start for start, _, _ in self._spans if start >= index)])

    def whole(self, length: int) -> int:
        """The longest prefix of at most this length that does not split an image."""
        return next((start for start, stop, _ in self._spans if start < length < stop), length)

    def position(self, index: int) -> int:
        """The position of the token at an index: images may take fewer positions than rows."""
        return index - sum(len(rows.ids) - rows.length for _, stop, rows in self._spans if stop <= index)

    def without(self, tokens: Sequence[int]) -> list[int]:
        """The text tokens."""
        text: list[int] = []
        at = 0
        for start, stop, _ in self._spans:
            text += tokens[at:start]
            at = stop
        return [*text, *tokens[at:]]

    def __bool__(self) -> bool:
        return bool(self._spans)

    def parts(self, first: int, stop: int) -> Iterator[tuple[int, int, int, ImageRows | None]]:
        """What indices first..stop-1 are made of, in order: (first, stop, start, image), each of one image or of text.

        start: where the image starts; `first` again for text, for which image is None.
        """
        while first < stop:
            start, end, image = next((span for span in self._spans if span[1] > first), (stop, stop, None))
            if start > first:
                start, end, image = first, min(start, stop), None
            yield first, min(end, stop), start, image
            first = min(end, stop)


def grid_of(rows: int, columns: int) -> ImageGrid:
    """The positions of a picture that is read row by row: its first position, row and column."""
    y, x = np.divmod(np.arange(rows * columns, dtype=np.int32), np.int32(columns))
    places = np.stack([np.zeros_like(y), y, x, np.zeros_like(y)])
    return ImageGrid(places, np.array([1, 1, 1, 0], np.int32), max(rows, columns))


def row_ids(content: bytes, number: int, count: int) -> tuple[int, ...]:
    """Ids for the rows of an image's run `number`: 62 bits each of its digest, so different images share no prefix."""
    stream = hashlib.shake_256(content + number.to_bytes(4, "little")).digest(8 * count)
    return tuple(_PLACEHOLDER | (value & _PLACEHOLDER - 1) for value in np.frombuffer(stream, "<u8").tolist())
