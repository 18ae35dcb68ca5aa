"""Pictures are checked before decoding: formats, sizes, and decompression bombs."""

import struct
import zlib

import pytest

from gpu_offload.errors import PictureError
from gpu_offload.pictures import MAX_BYTES, check_picture
from tests.gpu_offload.projector_files import chunk, png

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png_header(width: int, height: int, depth: int = 8, colour: int = 2, interlace: int = 0) -> bytes:
    return SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace))


def jpeg(width: int, height: int, scans: int = 1) -> bytes:
    """The markers of a JPEG, with a comment before its frame and no data in its scans."""
    comment = b"\xff\xfe" + struct.pack(">H", 2 + 5) + b"hello"
    frame = b"\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(9)
    return b"\xff\xd8\xff\xff\xe0\x00\x04ab" + comment + frame + scans * b"\xff\xda\x00\x02" + b"\xff\xd9"


def test_sizes_are_read_from_headers() -> None:
    assert check_picture(png(1, 40, 30)) == (40, 30)
    assert check_picture(jpeg(640, 480)) == (640, 480)
    rows = zlib.compress(bytes(2 * (1 + 2 * 4)))
    deep = png_header(2, 2, depth=16, interlace=1) + chunk(b"IDAT", rows[:5]) + chunk(b"IDAT", rows[5:])
    assert check_picture(deep + chunk(b"IEND", b"")) == (2, 2)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty. Convert it to PNG or JPEG"),
        (b"\x00" * 100, "neither PNG nor JPEG"),
        (b"GIF89a" + bytes(100), "is a GIF. Convert it to PNG or JPEG"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 " + bytes(100), "is a WebP"),
        (b"BM" + bytes(100), "is a BMP"),
        (b"\x00\x00\x00\x18ftypheic" + bytes(100), "is HEIC, AVIF or a video"),
        (SIGNATURE, "damaged PNG"),
        (png()[:-12], "damaged PNG"),
        (png()[:60], "damaged PNG"),
        (png_header(8, 8, depth=3) + chunk(b"IEND", b""), "damaged PNG"),
        (png_header(8, 8) + chunk(b"IDAT", b"no zlib") + chunk(b"IEND", b""), "damaged PNG"),
        (png_header(0, 8), "0 x 8 pixels"),
        (png_header(2**31 - 1, 2**31 - 1), "pixels"),
        (png_header(20000, 1), "16,384 a side"),
        (png_header(8000, 8000), "8000 x 8000"),
        (png_header(8, 8) + chunk(b"IDAT", zlib.compress(bytes(10**7))) + chunk(b"IEND", b""), "decompresses to more"),
        (jpeg(65535, 65535), "65535 x 65535"),
        (jpeg(64, 64, scans=100), "more than 64 scans"),
        (b"\xff\xd8\xff\xd9" + bytes(30), "damaged JPEG"),
        (b"\xff\xd8\xff\xe0\xff\xff" + bytes(30), "damaged JPEG"),
        (bytes(MAX_BYTES + 1), "Send a smaller one"),
    ],
)
def test_what_is_not_safe_to_decode_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(PictureError, match=problem):
        check_picture(data)
