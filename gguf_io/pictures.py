"""Decodes pictures of untrusted files into pixels, in a confined child process."""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gguf_io.confined import ChildEndedError, ConfinedChildren, Reply
from gguf_io.errors import PictureError
from gguf_io.picture_worker import MAX_BYTES, MAX_MEMORY_BYTES

CPU_SECONDS = 10.0  # for a picture
WALL_SECONDS = 3 * CPU_SECONDS
_MOST_CHILDREN = 2


class Picture(NamedTuple):
    """A decoded picture. pixels: uint8[height, width, 3], red first. frames: of an animation, which shows its first."""

    pixels: NDArray[np.uint8]
    frames: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.pixels.shape[1], self.pixels.shape[0]


def decode(data: bytes) -> Picture:
    """Decode a picture file: turned as its EXIF says, transparent parts on white, with 8 bits per colour.

    Raises PictureError for a file that is no picture, damaged or too large.
    """
    reply = _asked("decode", data)
    pixels = np.frombuffer(reply["raw"], np.uint8).reshape(reply["height"], reply["width"], 3)
    return Picture(pixels, reply["frames"])


def check(data: bytes) -> tuple[int, int]:
    """The width and height of a picture file, as it will be turned. Raises what `decode` does, not for each damage."""
    reply = _asked("check", data)
    return reply["width"], reply["height"]


def _asked(kind: str, data: bytes) -> Reply:
    if not data:
        raise PictureError("The image is empty.")
    if len(data) > MAX_BYTES:
        raise PictureError(f"The image has {len(data):,} bytes, more than {MAX_BYTES:,}. Send a smaller one.")
    try:
        reply = _children().ask(kind, data, CPU_SECONDS, WALL_SECONDS)
    except ChildEndedError as error:
        raise PictureError(f"The image cannot be decoded: {error}. Save it again, or send a smaller one.") from error
    except OSError as error:
        raise PictureError(f"The image cannot be decoded, since no process can be started: {error}.") from error
    if "error" in reply:
        raise PictureError(reply["error"])
    return reply


@functools.cache
def _children() -> ConfinedChildren:
    return ConfinedChildren("gguf_io.picture_worker", MAX_MEMORY_BYTES, _MOST_CHILDREN)
