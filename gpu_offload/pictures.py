"""Checks an image file before it is decoded: format, size, and the decompressed size of a PNG.

llama.cpp decodes with stb_image, which trusts its callers: a few bytes can cause gigabytes of memory or hours of work.
So everything here is bounded, and only PNG and JPEG are accepted.
PNG: https://www.w3.org/TR/png-3/. JPEG: ITU-T T.81, annex B.
"""

import struct
import zlib
from collections.abc import Iterator

from gpu_offload.errors import PictureError

MAX_BYTES = 16 * 2**20
MAX_PIXELS = 2**25  # 8K video has slightly fewer; three bytes each when decoded
MAX_SIDE = 2**14
MAX_SCANS = 64  # of a progressive JPEG; each scan visits every pixel

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
# Signatures of other formats and their offsets, for error messages. HEIC and AVIF share a container.
_OTHERS = (
    (0, b"GIF8", "a GIF"),
    (8, b"WEBP", "a WebP"),
    (0, b"BM", "a BMP"),
    (0, b"II*\x00", "a TIFF"),
    (0, b"MM\x00*", "a TIFF"),
    (4, b"ftyp", "HEIC, AVIF or a video"),
    (0, b"%PDF", "a PDF"),
    (0, b"<svg", "an SVG"),
    (0, b"<?xml", "an SVG"),
)
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of PNG's colour types
_STEP = 1 << 20
# JPEG markers that begin a frame, which has the size; the others of C0..CF are tables.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN = b"\xff\xda"


def check_picture(data: bytes) -> tuple[int, int]:
    """Return width and height of a PNG or JPEG that is safe to decode. Raises PictureError for any other data."""
    if len(data) > MAX_BYTES:
        raise PictureError(f"The image has {len(data):,} bytes, more than {MAX_BYTES:,}. Send a smaller one.")
    if data.startswith(_PNG):
        width, height = _checked(_png_size(data))
        _check_decompressed(data, height)
    elif data.startswith(_JPEG):
        width, height = _checked(_jpeg_size(data))
        if data.count(_SCAN) > MAX_SCANS:
            raise PictureError(f"The JPEG has more than {MAX_SCANS} scans. Save it again as a plain JPEG or PNG.")
    else:
        named = (name for at, mark, name in _OTHERS if data.startswith(mark, at))
        found = next(named, "neither PNG nor JPEG" if data else "empty")
        raise PictureError(f"The image is {found}. Convert it to PNG or JPEG.")
    return width, height


def _checked(size: tuple[int, int]) -> tuple[int, int]:
    width, height = size
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE and width * height <= MAX_PIXELS):
        raise PictureError(
            f"The image has {width} x {height} pixels; the most are {MAX_PIXELS:,}, and {MAX_SIDE:,} a side. "
            "Send a smaller one."
        )
    return width, height


def _png_size(data: bytes) -> tuple[int, int]:
    if len(data) < 33 or data[8:16] != b"\x00\x00\x00\x0dIHDR":
        raise _damaged("PNG")
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _check_decompressed(data: bytes, height: int) -> None:
    """Raise PictureError if a PNG's rows decompress to more than its header says."""
    width, _, depth, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data, 16)
    if colour not in _CHANNELS or depth not in (1, 2, 4, 8, 16) or interlace > 1:
        raise _damaged("PNG")
    bits = width * _CHANNELS[colour] * depth
    # Each row begins with a filter byte; the seven passes of an interlaced PNG have up to twice the rows, each rounded
    # up.
    limit = height * (bits // 8 + 2) * (1 + interlace) + 64
    decompressor, size = zlib.decompressobj(), 0
    try:
        for packed in _png_data(data):
            left = packed
            while left:
                size += len(decompressor.decompress(left, _STEP))
                if size > limit:
                    raise PictureError("The PNG decompresses to more than its header says. Save it again.")
                left = decompressor.unconsumed_tail
    except zlib.error as error:
        raise _damaged("PNG") from error


def _png_data(data: bytes) -> Iterator[bytes]:
    """The contents of the IDAT chunks."""
    at = len(_PNG)
    while at + 8 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind = data[at + 4 : at + 8]
        if at + 12 + length > len(data):
            break
        if kind == b"IDAT":
            yield data[at + 8 : at + 8 + length]
        if kind == b"IEND":
            return
        at += 12 + length
    raise _damaged("PNG")


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes
            at += 1
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        at += 2 + length
    raise _damaged("JPEG")


def _damaged(kind: str) -> PictureError:
    return PictureError(f"The image is a damaged {kind}. Save it again.")
