"""Pictures in messages, through textual-image: kitty's protocol or sixels, else half blocks in colour.

textual-image is an optional extra. Without it, or without a terminal, only a picture's name and size are shown.
"""

import importlib.util
import os
import sys
from collections.abc import Callable

from textual.widget import Widget

MOST_PIXELS = (1600, 1200)  # larger than any message's area

_drawing: Callable[..., Widget] | None = None  # draws a PIL image


def use_pictures() -> None:
    """Prepare to draw pictures if textual-image is there. Call before the application reads the terminal's input.

    textual-image asks the terminal itself and takes a third of a second, so ask tui.terminal first.
    """
    global _drawing  # noqa: PLW0603 - a fact about the process's terminal
    if importlib.util.find_spec("textual_image") is None or not _has_size():
        return
    from textual_image.renderable import Image, SixelImage, TGPImage
    from textual_image.widget import HalfcellImage
    from textual_image.widget import Image as Drawing

    _drawing = Drawing if Image in (SixelImage, TGPImage) else HalfcellImage


def _has_size() -> bool:
    """Whether standard output is a terminal with rows and columns. textual-image divides by them."""
    try:
        return min(os.get_terminal_size(sys.stdout.fileno())) > 0
    except (OSError, ValueError, AttributeError):  # no terminal, or closed
        return False


def drawn(data: bytes) -> Widget | None:
    """A picture's widget; None if pictures are not drawn or the file is damaged."""
    if _drawing is None:
        return None
    from PIL import Image

    from gguf_io.errors import PictureError
    from gguf_io.pictures import decode

    try:
        picture = Image.fromarray(decode(data).pixels)
    except PictureError:
        return None
    picture.thumbnail(MOST_PIXELS)
    return _drawing(picture, classes="picture")
