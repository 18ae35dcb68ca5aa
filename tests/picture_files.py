"""Pictures for tests."""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray


def png(seed: int = 0, width: int = 40, height: int = 30) -> bytes:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return png_of(pixels)


def png_of(pixels: NDArray[np.uint8]) -> bytes:
    """Encode pixels, uint8[height, width, 3]."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\x00" + row.tobytes() for row in pixels)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*each)
        for each in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(rows)),
            (b"IEND", b""),
        )
    )


def chunk(kind: bytes, content: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
