"""Pictures in the messages, where the terminal draws them: by sixels or kitty's protocol, through textual-image.

An extra. Without it, or on another terminal, a picture is its name and size.
"""

import importlib.util
from collections.abc import Callable
from io import BytesIO

from textual.widget import Widget

MOST_PIXELS = (1600, 1200)  # more than any message has room for

_drawing: Callable[..., Widget] | None = None  # draws a PIL image


def ask_terminal() -> None:
    """Find out whether the terminal draws pictures. Before the application starts: later, its keys are read by it."""
    global _drawing  # noqa: PLW0603 - a fact about the process's terminal
    if importlib.util.find_spec("textual_image") is None:
        return
    from textual_image.renderable import Image, SixelImage, TGPImage
    from textual_image.widget import Image as Drawing

    _drawing = Drawing if Image in (SixelImage, TGPImage) else None


def drawn(data: bytes) -> Widget | None:
    """A picture's widget; None where the terminal draws none, or where the file is damaged."""
    if _drawing is None:
        return None
    from PIL import Image

    try:
        picture = Image.open(BytesIO(data), formats=("PNG", "JPEG"))
        picture.thumbnail(MOST_PIXELS)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    return _drawing(picture.convert("RGB"), classes="picture")
