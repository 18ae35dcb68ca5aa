"""Sounds of untrusted files: WAV, decoded in a confined child process. They pass where pictures pass."""

import numpy as np
from numpy.typing import NDArray

from gguf_io import pictures
from gguf_io.media import is_sound
from gguf_io.pictures import asked

Samples = NDArray[np.float32]
"""float32[samples] from -1 to 1, of one channel."""


def check(data: bytes) -> None:
    """Raise PictureError for a file that is neither a picture nor a sound, not for each damage."""
    if is_sound(data):
        samples_of(data, 1)
    else:
        pictures.check(data)


def samples_of(data: bytes, rate: int) -> int:
    """How many samples a sound has at a rate. Raises PictureError."""
    found: int = asked("sound", f"length {rate}", data)["samples"]
    return found


def decode(data: bytes, rate: int) -> Samples:
    """A sound's samples at a rate, its channels mixed. Raises PictureError."""
    return np.frombuffer(asked("sound", f"samples {rate}", data)["raw"], np.float32)
