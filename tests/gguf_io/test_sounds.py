"""WAV files are decoded in a confined process: formats, channels, rates, and damage, which is one sentence."""

import io
import struct
import wave

import numpy as np
import pytest

from gguf_io import sounds
from gguf_io.errors import PictureError
from gguf_io.pictures import MAX_BYTES
from gguf_io.wav import resampled

TONE = (0.5 * np.sin(np.arange(400) / 7)).astype(np.float32)


def wav(frames: np.ndarray, width: int = 2, rate: int = 16_000) -> bytes:
    """Samples from -1 to 1, [samples] or [samples, channels], written by Python's own module."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1 if frames.ndim == 1 else frames.shape[1])
        writer.setsampwidth(width)
        writer.setframerate(rate)
        whole = np.round(frames.reshape(-1).astype(np.float64) * (2 ** (8 * width - 1) - 1)).astype("<i8")
        unsigned = whole + (128 if width == 1 else 0)
        writer.writeframes(unsigned[:, None].view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return file.getvalue()


def parts(*named: tuple[bytes, bytes]) -> bytes:
    body = b"".join(name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2) for name, data in named)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WAVE" + body


def header(kind: int = 1, channels: int = 1, rate: int = 16_000, bits: int = 16, more: bytes = b"") -> bytes:
    align = channels * bits // 8
    return struct.pack("<HHIIHH", kind, channels, rate, rate * align & 0xFFFFFFFF, align, bits) + more


@pytest.mark.parametrize(("width", "error"), [(1, 2e-2), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
def test_whole_numbers_of_all_widths(width: int, error: float) -> None:
    assert sounds.samples_of(wav(TONE, width), 16_000) == len(TONE)
    np.testing.assert_allclose(sounds.decode(wav(TONE, width), 16_000), TONE, atol=error)


@pytest.mark.parametrize("kind", ["<f4", "<f8"])
def test_floats_extensible_headers_and_other_parts(kind: str) -> None:
    bits = 8 * np.dtype(kind).itemsize
    subformat = struct.pack("<HHI", 22, bits, 4) + struct.pack("<H", 3) + bytes(14)
    loud = np.concatenate([TONE, [7.0, -1e30]])
    data = parts(
        (b"LIST", b"odd"), (b"fmt ", header(0xFFFE, bits=bits, more=subformat)), (b"data", loud.astype(kind).tobytes())
    )
    np.testing.assert_array_equal(sounds.decode(data, 16_000), np.concatenate([TONE, [1, -1]]).astype(np.float32))


def test_channels_are_mixed() -> None:
    both = np.stack([TONE, -TONE / 2], axis=1)
    np.testing.assert_allclose(sounds.decode(wav(both), 16_000), TONE / 4, atol=1e-4)


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_a_length_that_the_writer_did_not_know(size: int) -> None:
    data = bytearray(wav(TONE))
    data[40:44] = struct.pack("<I", size)
    assert len(sounds.decode(bytes(data), 16_000)) == len(TONE)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 12_347])
def test_another_rate_keeps_tones_and_leaves_out_what_is_too_high(rate: int) -> None:
    def tone(hertz: float, of: int) -> np.ndarray:
        return np.sin(2 * np.pi * hertz * np.arange(of // 4) / of).astype(np.float32)

    inside = slice(400, 3500)  # away from the ends, where the sound begins at once
    found = sounds.decode(wav(tone(1000, rate), 4, rate), 16_000)
    assert len(found) == sounds.samples_of(wav(tone(1000, rate), 4, rate), 16_000) == -(-(rate // 4) * 16_000 // rate)
    np.testing.assert_allclose(found[inside], tone(1000, 16_000)[inside], atol=2e-3)
    if rate > 22_050:
        assert np.abs(resampled(tone(9500, rate), rate, 16_000)[inside]).max() < 1e-3


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"RIFF\x04\0\0\0WAVE", "a part of the WAV file is missing"),
        (parts((b"data", bytes(8))), "a part of the WAV file is missing"),
        (parts((b"fmt ", bytes(8)), (b"data", bytes(8))), "its format is cut off"),
        (parts((b"fmt ", header(85)), (b"data", bytes(8))), "a WAV of the format 85 with 16 bits"),
        (parts((b"fmt ", header(bits=12)), (b"data", bytes(8))), "with 12 bits"),
        (parts((b"fmt ", header(channels=0)), (b"data", bytes(8))), "0 channels"),
        (parts((b"fmt ", header(channels=9)), (b"data", bytes(18))), "9 channels"),
        (parts((b"fmt ", header(rate=0)), (b"data", bytes(8))), "and 0 samples a second"),
        (parts((b"fmt ", header(rate=0xFFFFFFFF)), (b"data", bytes(8))), "4,294,967,295 samples a second"),
        (parts((b"fmt ", header()), (b"data", b"")), "has no samples"),
        (parts((b"fmt ", header()), (b"data", b"\1")), "has no samples"),
        (wav(TONE)[:-20], "cut off after 780 of 800 bytes"),
        (parts((b"fmt ", header(3, bits=32)), (b"data", struct.pack("<2f", 0.5, float("nan")))), "not numbers"),
        (wav(TONE) + bytes(MAX_BYTES), "more than 33,554,432"),
    ],
)
def test_what_cannot_be_decoded_is_one_sentence(data: bytes, problem: str) -> None:
    with pytest.raises(PictureError) as caught:
        sounds.decode(data, 16_000)
    assert problem in str(caught.value) and "\n" not in str(caught.value)
    assert len(sounds.decode(wav(TONE), 16_000)) == len(TONE)


def test_random_damage_is_a_sentence_or_a_sound() -> None:
    rng, whole = np.random.default_rng(8), wav(TONE)
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(4, 46, 3):
            data[at] = rng.integers(256)
        if sounds.is_sound(bytes(data)):
            try:
                assert np.isfinite(sounds.decode(bytes(data), 16_000)).all()
            except PictureError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize(
    "data", [b"ID3" + bytes(40), b"fLaC" + bytes(40), b"OggS" + bytes(40), b"\xff\xfb" + bytes(40)]
)
def test_other_sounds_are_named_as_such(data: bytes) -> None:
    with pytest.raises(PictureError, match="a sound, but no WAV"):
        sounds.check(data)
