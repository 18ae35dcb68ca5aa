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
