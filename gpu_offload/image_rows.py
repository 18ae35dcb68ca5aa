"""Rows of an image, as a projector makes them, and the positions that a model gives them.

Most models number an image's rows like tokens. Those with M-RoPE (Qwen2-VL and its successors) position them in time,
height and width, and continue after the image as if it took as many positions as its longer side.
Source: mtmd_image_tokens_get_decoder_pos and mtmd_input_chunk_get_n_pos (tools/mtmd/mtmd.cpp in llama.cpp).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
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
    grid: Grid | None = None

    def positions(self, first: int, start: int, stop: int) -> NDArray[np.int32]:
        """Positions of rows start..stop-1 of an image that begins at `first`, one dimension after another."""
        if self.grid is None:
            return np.arange(first + start, first + stop, dtype=np.int32)
        return (self.grid.places[:, start:stop] + self.grid.moves[:, None] * np.int32(first)).ravel()


# An image in a prompt: runs of rows, with the ids of tokens before, between and after them.
ImagePieces = tuple[ImageRows | tuple[int, ...], ...]


class PositionBook:
    """Maps rows of sequences to positions: an image with a grid takes fewer positions than rows."""

    def __init__(self) -> None:
        # By sequence, for each image: its first row, the row after its last, and the positions saved so far.
        self._images: dict[int, list[tuple[int, int, int]]] = {}

    def at(self, sequence: int, row: int) -> int:
        """The position of a row, or of the next row to append. Raises ValueError for a row within an image."""
        saved = 0
        for start, stop, so_far in self._images.get(sequence, ()):
            if start < row < stop:
                raise ValueError(f"row {row} of sequence {sequence} is within an image, which cannot be split")
            if stop <= row:
                saved = so_far
        return row - saved

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows to append (tokens, row numbers, sequences), with row numbers replaced by positions."""
        if not self._images:
            return rows
        moved = rows.copy()
        for sequence, images in self._images.items():
            moved[1, rows[2] == sequence] -= images[-1][2]
        return moved

    def append(self, sequence: int, start: int, image: ImageRows) -> None:
        """Record an image appended to a sequence as its rows from `start` on."""
        if image.grid is None:
            return
        saved = start - self.at(sequence, start) + len(image.ids) - image.grid.count
        self._images.setdefault(sequence, []).append((start, start + len(image.ids), saved))

    def share(self, source: int, target: int, length: int) -> None:
        """Let an empty sequence begin with the first `length` rows of another."""
        if kept := [image for image in self._images.get(source, ()) if image[1] <= length]:
            self._images[target] = kept

    def truncate(self, sequence: int, length: int) -> None:
        """Forget a sequence's rows from `length` on."""
        if kept := [image for image in self._images.pop(sequence, ()) if image[1] <= length]:
            self._images[sequence] = kept
