"""Pictures are decoded in a confined process: formats, orientation, transparency, depth, damage and bombs."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from gguf_io import pictures
from gguf_io.errors import PictureError
from gguf_io.pictures import MAX_BYTES
from tests.picture_files import chunk, png

SIGNATURE = b"\x89PNG\r\n\x1a\n"
PIXELS = np.random.default_rng(3).integers(0, 256, (6, 9, 3), np.uint8)


def png_header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    return SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "GIF", "JPEG"])
def test_formats(kind: str) -> None:
    image = Image.fromarray(PIXELS)
    data = saved(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    picture = pictures.decode(data)
    assert pictures.check(data) == picture.size == (9, 6)
    if kind in ("GIF", "JPEG"):
        np.testing.assert_array_equal(picture.pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    else:
        np.testing.assert_array_equal(picture.pixels, PIXELS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_turned_as_its_exif_says(kind: str) -> None:
    wide = Image.new("RGB", (64, 32), "red")
    wide.paste("blue", (0, 0, 32, 32))
    turn = Image.Exif()
    turn[0x0112] = 6  # to be turned clockwise
    data = saved(wide, kind, exif=turn)
    picture = pictures.decode(data)
    assert pictures.check(data) == picture.size == (32, 64)
    top, bottom = picture.pixels[8, 16], picture.pixels[56, 16]
    assert (top > (-1, -1, 200)).all()
    assert (bottom > (200, -1, -1)).all()
    assert max(top[0], bottom[2]) < 60


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_are_white(mode: str) -> None:
    image = Image.new("RGBA", (8, 4), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 4))
    data = saved(image.convert(mode) if mode != "P" else image.quantize(4))
    pixels = pictures.decode(data).pixels
    assert (pixels[:, :4] == 0).all()
    assert (pixels[:, 4:] == 255).all()


def sixteen_bits() -> bytes:
    shades = np.array([[0, 257, 32896, 65535]], np.uint16)
    return saved(Image.fromarray(shades))


def cmyk() -> bytes:
    return saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)


def one_bit() -> bytes:
    return saved(Image.fromarray(np.array([[True, False, True]])))


@pytest.mark.parametrize(
    ("made", "first_row"),
    [
        (sixteen_bits, [[0] * 3, [1] * 3, [128] * 3, [255] * 3]),
        (cmyk, [[254, 0, 0]] * 8),
        (one_bit, [[255] * 3, [0] * 3, [255] * 3]),
    ],
)
def test_other_depths_and_colours(made: Callable[[], bytes], first_row: list[list[int]]) -> None:
    found = pictures.decode(made()).pixels[0].astype(int)
    assert np.abs(found - first_row).max() <= 2


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_shows_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "green")]
    picture = pictures.decode(saved(frames[0], kind, save_all=True, append_images=frames[1:]))
    assert picture.frames == 3
    assert picture.pixels[0, 0, 0] > 200


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (5000, 2)])
def test_thin_pictures(size: tuple[int, int]) -> None:
    assert pictures.decode(saved(Image.new("RGB", size))).size == size


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b"\x00" * 100, "of an unknown format. Convert it to PNG, JPEG or WebP"),
        (b"\x00\x00\x00\x18ftypheic" + bytes(100), "is HEIC, AVIF or a video"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is an SVG"),
        (b"%PDF-1.7", "is a PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unknown format"),
        (SIGNATURE, "damaged|unknown"),
        (png()[:60], "damaged"),
        (png_header(8, 8) + chunk(b"IDAT", b"no zlib") + chunk(b"IEND", b""), "damaged"),
        (png_header(100_000, 100_000) + chunk(b"IDAT", zlib.compress(bytes(10**6))), "100,000 x 100,000 pixels"),
        (png_header(70_000, 1) + chunk(b"IDAT", b""), "65,536 a side"),
        (saved(Image.fromarray(PIXELS), "JPEG")[:200], "damaged|unknown"),
        (bytes(MAX_BYTES + 1), "Send a smaller one"),
    ],
)
def test_what_cannot_be_decoded_is_one_sentence(data: bytes, problem: str) -> None:
    with pytest.raises(PictureError, match=problem) as caught:
        pictures.decode(data)
    assert "\n" not in str(caught.value)
    assert pictures.decode(png(1)).size == (40, 30)  # the next one is decoded


def test_a_bomb_of_text_takes_no_memory() -> None:
    bomb = chunk(b"zTXt", b"comment\x00\x00" + zlib.compress(bytes(200 << 20)))
    header = png_header(1, 1)
    data = header + bomb + chunk(b"IDAT", zlib.compress(b"\x00\x01\x02\x03")) + chunk(b"IEND", b"")
    with pytest.raises(PictureError, match="image"):
        pictures.decode(data)
    assert pictures.decode(png(1)).size == (40, 30)


def page(size: int, width: int = 1000, height: int = 700) -> pictures.Picture:
    """Lines of text in letters of a size, black on white."""
    image = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size)
    for line in range(height // (size + size // 3)):
        draw.text((20, line * (size + size // 3)), "The quick brown fox jumps over the lazy dog. " * 4, "black", font)
    return pictures.Picture(np.asarray(image))


@pytest.mark.parametrize(
    ("size", "shrunk", "hinted"),
    [(14, 0.4, True), (14, 1.0, False), (28, 0.25, True), (28, 0.8, False), (60, 0.4, False)],
)
def test_small_text_is_noticed_only_where_it_became_unreadable(size: int, shrunk: float, hinted: bool) -> None:
    shown = page(size)
    resized = round(shown.size[0] * shrunk), round(shown.size[1] * shrunk)
    assert pictures.text_is_too_small(shown, resized) is hinted


def test_pictures_without_text_give_no_hint() -> None:
    rng = np.random.default_rng(5)
    noise = rng.integers(0, 256, (600, 800, 3), np.uint8)
    ramp = np.repeat(np.linspace(0, 255, 800, dtype=np.uint8)[None, :, None], 600, 0).repeat(3, 2)
    for pixels in (noise, ramp, np.full((600, 800, 3), 255, np.uint8), np.zeros((600, 1, 3), np.uint8)):
        assert not pictures.text_is_too_small(pictures.Picture(pixels), (40, 30))
