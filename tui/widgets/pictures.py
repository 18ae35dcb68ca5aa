"""Pictures in messages, on terminals that support sixels or kitty's protocol, through textual-image.

textual-image is an optional extra. Without it, or on other terminals, only a picture's name and size are shown.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from io import BytesIO

from textual.widget import Widget

MOST_PIXELS = (1600, 1200)  # larger than any message's area

_drawing: Callable[..., Widget] | None = None  # draws a PIL image


def use_pictures() -> None:
    """Prepare to draw pictures if textual-image can. Call before the application starts and reads the terminal's input.

    textual-image asks the terminal itself and takes a third of a second, so ask tui.terminal first.
    """
    global _drawing  # noqa: PLW0603 - a fact about the process's terminal
    if importlib.util.find_spec("textual_image") is None or not _has_size():
        return
    from textual_image.renderable import Image, SixelImage, TGPImage
    from textual_image.widget import Image as Drawing

    _drawing = Drawing if Image in (SixelImage, TGPImage) else None


def _has_size() -> bool:
    """Whether standard output is a terminal with rows and columns. textual-image divides by them."""
    try:
        return min(os.get_terminal_size(sys.stdout.fileno())) > 0
    except (OSError, ValueError, AttributeError):  # no terminal, or closed
        return False


def drawn(data: bytes) -> Widget | None:
    """A picture's widget; None if the terminal cannot draw pictures or the file is damaged."""
    if _drawing is None:
        return None
    from PIL import Image

    try:
        picture = Image.open(BytesIO(data), formats=("PNG", "JPEG"))
        picture.thumbnail(MOST_PIXELS)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    return _drawing(picture.convert("RGB"), classes="picture")
