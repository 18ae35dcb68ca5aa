"""WAV files as samples: PCM of 8 to 32 bits and floats, several channels mixed into one, at another rate.

Called by the confined process that reads untrusted files (gguf_io.media_worker).
Source: https://learn.microsoft.com/windows/win32/api/mmreg/ns-mmreg-waveformatextensible
"""

import math
import struct
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

LEAST_RATE, MOST_RATE, MOST_CHANNELS = 1_000, 192_000, 8
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN_LENGTHS = 0, 0xFFFFFFFF  # of writers that could not seek
_BLOCK = 1 << 12  # samples that are made at a time

# The filter of `resampled`: zero crossings on each side, the pass band's share, and the window's shape, which leave
# tones above half of the rate at less than a thousandth.
_ZEROS, _PASSED, _BETA = 32, 0.92, 10.0


class WavError(Exception):
    """A file that cannot be read; a sentence for users."""


class Wav(NamedTuple):
    """Where a file's samples lie. kind: NumPy's type of one, of `width` bytes; frames: of all channels."""

    kind: str
    width: int
    channels: int
    rate: int
    first: int
    frames: int


def read_header(data: bytes) -> Wav:
    """Raises WavError for a file that is damaged, or of a format, rate or number of channels that is not read."""
    about: tuple[int, int, int, int] | None = None
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        if name == b"fmt ":
            about = _format(data[at : at + size])
        elif name == b"data":
            if about is None:
                break
            return _samples(data, at, size, *about)
        at += size + size % 2
    raise WavError("The sound is damaged: a part of the WAV file is missing. Save it again.")


def _format(part: bytes) -> tuple[int, int, int, int]:
    """The format, channels, rate and bits of a part "fmt "."""
    if len(part) < 16:
        raise WavError("The sound is damaged: its format is cut off. Save it again.")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", part)
    if kind == _EXTENSIBLE and len(part) >= 26:
        (kind,) = struct.unpack_from("<H", part, 24)
    return kind, channels, rate, bits


def _samples(data: bytes, at: int, size: int, kind: int, channels: int, rate: int, bits: int) -> Wav:
    if (kind, bits) not in _KINDS:
        raise WavError(f"The sound is a WAV of the format {kind} with {bits} bits. Convert it to 16-bit PCM.")
    if not (1 <= channels <= MOST_CHANNELS and LEAST_RATE <= rate <= MOST_RATE):
        raise WavError(
            f"The sound has {channels:,} channels and {rate:,} samples a second; at most {MOST_CHANNELS}, and "
            f"{LEAST_RATE:,} to {MOST_RATE:,}, are read. Convert it to one channel of 16,000."
        )
    there, width = len(data) - at, bits // 8
    if size in _UNKNOWN_LENGTHS:
        size = there
    if size > there:
        raise WavError(f"The sound is cut off after {there:,} of {size:,} bytes. Save or send it again.")
    frames = size // (width * channels)
    if not frames:
        raise WavError("The sound has no samples. Record it again.")
    return Wav(_KINDS[kind, bits], width, channels, rate, at, frames)


_KINDS = {
    (_PCM, 8): "u1",
    (_PCM, 16): "<i2",
    (_PCM, 24): "u1",
    (_PCM, 32): "<i4",
    (_FLOAT, 32): "<f4",
    (_FLOAT, 64): "<f8",
}


def read_samples(data: bytes, rate: int) -> NDArray[np.float32]:
    """A file's samples from -1 to 1, the mean of its channels, at a rate. Raises WavError."""
    wav = read_header(data)
    count = wav.frames * wav.channels
    items = count * wav.width // np.dtype(wav.kind).itemsize
    values = np.frombuffer(data, wav.kind, items, wav.first)
    if wav.width == 3:  # as the upper bytes of 32 bits
        wide = np.zeros((count, 4), np.uint8)
        wide[:, 1:] = values.reshape(count, 3)
        values = wide.view("<i4")[:, 0]
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            raise WavError("The sound has samples that are not numbers. Save it again.")
        found = np.clip(values, -1, 1).astype(np.float32)
    else:
        middle = 128 if values.dtype.kind == "u" else 0
        found = (values.astype(np.float32) - middle) / np.float32(2.0 ** (8 * values.dtype.itemsize - 1))
    return resampled(found.reshape(wav.frames, wav.channels).mean(axis=1, dtype=np.float32), wav.rate, rate)


def samples_at(wav: Wav, rate: int) -> int:
    """How many samples `read_samples` makes of a file at a rate."""
    return -(-wav.frames * rate // wav.rate)


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Samples at another rate, by a windowed sinc: tones above half of the wanted rate are left out."""
    if rate == wanted:
        return samples
    shared = math.gcd(rate, wanted)
    up, down = wanted // shared, rate // shared
    cutoff = _PASSED * min(1.0, up / down)
    half = math.ceil(_ZEROS / cutoff)
    # The filter for each place between two samples at which a new one may lie.
    away = np.arange(1 - half, half + 1) - np.arange(up)[:, None] / up
    window = np.i0(_BETA * np.sqrt(np.clip(1 - (away / half) ** 2, 0, None))) / np.i0(_BETA)
    weights = (cutoff * np.sinc(cutoff * away) * window).astype(np.float32)
    around = sliding_window_view(np.pad(samples, (half - 1, half + 1)), 2 * half)
    found = np.empty(-(-len(samples) * up // down), np.float32)
    for first in range(0, len(found), _BLOCK):
        places = np.arange(first, min(first + _BLOCK, len(found))) * down
        found[first : first + _BLOCK] = np.einsum("ij,ij->i", around[places // up], weights[places % up])
    return found
