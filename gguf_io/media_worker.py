"""The confined child process that decodes pictures with Pillow, and sounds.

The kind of a request is "check" or "decode", its data a picture; or "length" or "samples" and a number of samples a
second, its data a WAV file. The reply is {"width", "height", "frames"}, after "decode" with the pixels as raw bytes;
{"samples"}, after "samples" with them as raw bytes, float32; or {"error": text}.
"""

import io
import warnings
from typing import TYPE_CHECKING

from gguf_io.confined import Reply, answer_requests

if TYPE_CHECKING:
    from PIL import Image

MAX_MEMORY_BYTES = 1 << 30
MAX_PIXELS = 1 << 26  # four bytes each, twice, while they are converted
MAX_SIDE = 1 << 16
# Those that browsers show, and TIFF; each decoder is one more way in.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
# Signatures of other formats and their offsets, for messages. HEIC and AVIF share a container.
_OTHERS = (
    (4, b"ftyp", "HEIC, AVIF or a video"),
    (0, b"%PDF", "a PDF"),
    (0, b"<svg", "an SVG"),
    (0, b"<?xml", "an SVG"),
)
_SOUNDS = (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"fLaC", b"OggS", b"FORM")  # MP3, FLAC, Ogg, AIFF


def main() -> None:
    """Answer requests until stdin closes."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # checked here, with a limit and a message of our own
    warnings.simplefilter("ignore")  # about damaged metadata, which does not matter
    answer_requests(_answer, MAX_MEMORY_BYTES)


def _answer(kind: str, data: bytes) -> Reply:
    what, _, rate = kind.partition(" ")
    return _heard(what, data, int(rate)) if rate else _seen(what, data)


def _heard(kind: str, data: bytes, rate: int) -> Reply:
    from gguf_io.wav import WavError, read_header, read_samples, samples_at

    try:
        if kind == "length":
            return {"samples": samples_at(read_header(data), rate)}
        samples = read_samples(data, rate)
    except WavError as error:
        return {"error": str(error)}
    return {"samples": len(samples), "raw": samples.tobytes()}


def _seen(kind: str, data: bytes) -> Reply:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        return {"error": _other_format(data)}
    except MemoryError:
        raise
    except Exception:  # whatever a decoder raises on an untrusted file
        return {"error": "The image is damaged. Save it again."}
    width, height = image.size
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE and width * height <= MAX_PIXELS):
        return {
            "error": f"The image has {width:,} x {height:,} pixels; the most are {MAX_PIXELS:,}, and {MAX_SIDE:,} a "
            "side. Send a smaller one."
        }
    try:
        frames = getattr(image, "n_frames", 1)
        turned = ImageOps.exif_transpose(image) if kind == "decode" else image
        if kind == "check":
            sideways = image.getexif().get(_ORIENTATION, 1) >= _SIDEWAYS
            return {"width": height, "height": width} if sideways else {"width": width, "height": height}
        pixels = _rgb(turned)
    except MemoryError:
        raise
    except Exception as error:  # as above: damaged, or cut short
        return {"error": f"The image is damaged: {str(error)[:200] or type(error).__name__}. Save it again."}
    return {"width": pixels.width, "height": pixels.height, "frames": frames, "raw": pixels.tobytes()}


def _other_format(data: bytes) -> str:
    if data.startswith(_SOUNDS):
        return "The file is a sound, but no WAV. Convert it to WAV."
    named = next((f"The image is {name}." for at, mark, name in _OTHERS if data.startswith(mark, at)), "")
    return f"{named or 'The image is of an unknown format.'} Convert it to PNG, JPEG or WebP."


_ORIENTATION, _SIDEWAYS = 0x0112, 5  # EXIF's tag, and its first value that exchanges width and height


def _rgb(image: "Image.Image") -> "Image.Image":
    """The picture in three colours of 8 bits; transparent parts are white."""
    if image.mode in _SIXTEEN_BITS:
        return image.convert("I").point(lambda shade: shade / 257).convert("L").convert("RGB")
    if image.mode == "F":
        return image.convert("L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        shown = image.convert("RGBA")
        from PIL import Image

        ground = Image.new("RGBA", shown.size, "white")
        return Image.alpha_composite(ground, shown).convert("RGB")
    return image.convert("RGB")
