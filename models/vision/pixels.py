"""Pixels as encoders read them: resized, cut into tiles and patches, and normalised.

Pictures are uint8[height, width, 3], red first. Resizing is Pillow's, on 8-bit values, as in the makers' processors.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gguf_io.media import Size
from models.vision.config import VisionConfig

Pixels = NDArray[np.uint8]
BILINEAR, BICUBIC, LANCZOS = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS


def resized(pixels: Pixels, size: Size, how: Image.Resampling) -> Pixels:
    """The picture stretched to a size."""
    if (pixels.shape[1], pixels.shape[0]) == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, how))


def padded_to_square(pixels: Pixels, side: int, how: Image.Resampling, colour: tuple[int, int, int]) -> Pixels:
    """The picture resized to fit into a square, and centred in it on a colour."""
    height, width = pixels.shape[:2]
    scale = side / max(height, width)
    size = min(side, math.ceil(width * scale)), min(side, math.ceil(height * scale))
    found = np.empty((side, side, 3), np.uint8)
    found[:] = colour
    top, left = (side - size[1]) // 2, (side - size[0]) // 2
    found[top : top + size[1], left : left + size[0]] = resized(pixels, size, how)
    return found


def tiles_of(pixels: Pixels, side: int) -> Iterator[Pixels]:
    """The square tiles of a picture in reading order; its sides are multiples of theirs."""
    for top in range(0, pixels.shape[0], side):
        for left in range(0, pixels.shape[1], side):
            yield pixels[top : top + side, left : left + side]


def patch_rows(pixels: Pixels, patch: int, config: VisionConfig) -> NDArray[np.float32]:
    """The normalised pixels of each square patch in reading order: float32[patches, 3 * patch * patch].

    A row has a patch's red values line by line, then green, then blue, like a convolution's kernel in a file.
    """
    shades = np.arange(256, dtype=np.float32)[:, None] / np.float32(255)
    table = (shades - np.asarray(config.mean, np.float32)) / np.asarray(config.deviation, np.float32)
    lines, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    found = np.empty((lines, columns, 3, patch, patch), np.float32)
    for colour in range(3):
        values = np.ascontiguousarray(table[:, colour])[pixels[..., colour]]
        found[:, :, colour] = values.reshape(lines, patch, columns, patch).swapaxes(1, 2)
    return found.reshape(lines * columns, -1)
