"""Decodes pictures of untrusted files into pixels, in a confined child process."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gguf_io.confined import ChildEndedError, ConfinedChildren, Reply
from gguf_io.errors import PictureError
from gguf_io.media import Size
from gguf_io.media_worker import MAX_MEMORY_BYTES

MAX_BYTES = 32 << 20  # of a file
CPU_SECONDS = 10.0  # for a picture
WALL_SECONDS = 3 * CPU_SECONDS
_MOST_CHILDREN = 2


@dataclass(frozen=True, slots=True)
class Budget:
    """The least and the most tokens that a picture may take; None for the model's own limits.

    Beyond its limits a model takes what is nearest. One whose pictures all have one size ignores budgets.
    """

    least_tokens: int | None = None
    most_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raise PictureError for numbers that are not positive, or not in order."""
        least, most = self.least_tokens, self.most_tokens
        if any(number is not None and number < 1 for number in (least, most)):
            raise PictureError("A picture's budget must be at least 1 token.")
        if least and most and least > most:
            raise PictureError(f"A picture cannot have at least {least:,} and at most {most:,} tokens.")


DEFAULT_BUDGET = Budget()


class Picture(NamedTuple):
    """A decoded picture. pixels: uint8[height, width, 3], red first. frames: of an animation, which shows its first."""

    pixels: NDArray[np.uint8]
    frames: int = 1

    @property
    def size(self) -> Size:
        """Width and height."""
        return self.pixels.shape[1], self.pixels.shape[0]


def decode(data: bytes) -> Picture:
    """Decode a picture file: turned as its EXIF says, transparent parts on white, with 8 bits per colour.

    Raises PictureError for a file that is no picture, damaged or too large.
    """
    reply = asked("image", "decode", data)
    pixels = np.frombuffer(reply["raw"], np.uint8).reshape(reply["height"], reply["width"], 3)
    return Picture(pixels, reply["frames"])


def check(data: bytes) -> Size:
    """The width and height of a picture file, as it will be turned. Raises what `decode` does, not for each damage."""
    reply = asked("image", "check", data)
    return reply["width"], reply["height"]


def asked(what: str, kind: str, data: bytes) -> Reply:
    """The reply of gguf_io.media_worker. what: names the file in errors. Raises PictureError."""
    if not data:
        raise PictureError(f"The {what} is empty.")
    if len(data) > MAX_BYTES:
        raise PictureError(f"The {what} has {len(data):,} bytes, more than {MAX_BYTES:,}. Send a smaller one.")
    try:
        reply = _children().ask(kind, data, CPU_SECONDS, WALL_SECONDS)
    except ChildEndedError as error:
        raise PictureError(f"The {what} cannot be decoded: {error}. Save it again, or send a smaller one.") from error
    except OSError as error:
        raise PictureError(f"The {what} cannot be decoded, since no process can be started: {error}.") from error
    if "error" in reply:
        raise PictureError(reply["error"])
    return reply


@functools.cache
def _children() -> ConfinedChildren:
    return ConfinedChildren("gguf_io.media_worker", MAX_MEMORY_BYTES, _MOST_CHILDREN)


_STRONG, _FLAT = 96, 8  # differences of neighbouring shades: an edge of a letter, an even ground
_LEAST_EDGES, _LEAST_FLAT = 0.01, 0.5  # shares of neighbours in a picture full of text
_GAPS = 4  # between edges of strokes, in a small letter's height
_LEGIBLE = 8.0  # pixels of a small letter's height
_MOST_ROWS = 512


def text_is_too_small(picture: Picture, resized: Size) -> bool:
    """Whether a picture looks full of text whose small letters are less than 8 pixels high after resizing.

    An estimate from up to 512 of its rows: text has an even ground (half of the neighbouring pixels nearly equal) and
    sharp edges (one in a hundred). A small letter is taken to be as high as four median gaps between edges of a row.
    """
    shrunk = min(resized[0] / picture.size[0], resized[1] / picture.size[1])
    if shrunk >= 1.0 or picture.size[0] < 2:
        return False
    step = -(-picture.size[1] // _MOST_ROWS)
    shades = picture.pixels[::step].astype(np.int16).sum(axis=2) // 3
    change = np.abs(np.diff(shades, axis=1))
    edges = change >= _STRONG
    if edges.mean() < _LEAST_EDGES or (change <= _FLAT).mean() < _LEAST_FLAT:
        return False
    rows, columns = np.nonzero(edges)
    gaps = np.diff(columns)[np.diff(rows) == 0]
    return bool(len(gaps)) and float(np.median(gaps)) * _GAPS * shrunk < _LEGIBLE
