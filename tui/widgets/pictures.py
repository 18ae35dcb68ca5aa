"""Pictures in the chat: by kitty's graphics, iTerm2's inline images or sixels, else as half blocks in colour.

textual-image, an optional extra, draws where the terminal has graphics.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from gguf_io.errors import PictureError
from localllm.background import in_thread
from localllm.text import harmless
from tui.terminal import Abilities

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = (1280, 960)  # larger than any message's area
MOST_PREVIEWS = 4

_drawing: Callable[..., Widget] | None = None  # draws a PIL image


def use_pictures(abilities: Abilities) -> None:
    """Prepare to draw pictures. Call before the application reads the terminal's input.

    textual-image asks the terminal itself, which takes a third of a second, so it is used only where that draws.
    """
    global _drawing  # noqa: PLW0603 - a fact about the process's terminal
    _drawing = HalfBlocks
    if not abilities.draws or importlib.util.find_spec("textual_image") is None or not _has_size():
        return
    from textual_image.renderable import Image, SixelImage, TGPImage
    from textual_image.widget import Image as Drawing

    if abilities.inline:
        from tui.widgets.inline_images import InlineImage

        _drawing = InlineImage
    elif Image in (SixelImage, TGPImage):
        _drawing = Drawing


def _has_size() -> bool:
    """Whether standard output is a terminal with rows and columns. textual-image divides by them."""
    try:
        return min(os.get_terminal_size(sys.stdout.fileno())) > 0
    except (OSError, ValueError, AttributeError):  # no terminal, or closed
        return False


@functools.lru_cache(maxsize=8)  # a preview's picture is drawn again in its message
def decoded(data: bytes) -> "Image | None":
    """A picture file as large as a message may show it; None if it is damaged."""
    from PIL import Image

    from gguf_io.pictures import decode

    try:
        picture = Image.fromarray(decode(data).pixels)
    except PictureError:
        return None
    picture.thumbnail(MOST_PIXELS)
    return picture


class DrawnPicture(Vertical):
    """A picture file, decoded in a thread; empty if it is damaged or pictures are not drawn."""

    def __init__(self, data: bytes) -> None:
        super().__init__(classes="drawn")
        self._data = data

    def on_mount(self) -> None:
        self.display = _drawing is not None
        if self.display:
            self.run_worker(self._draw())

    async def _draw(self) -> None:
        picture = await in_thread(lambda: decoded(self._data))
        if picture is None or _drawing is None:
            self.display = False
        else:
            await self.mount(_drawing(picture, classes="picture"))


class HalfBlocks(Widget):
    """A picture with two pixels in each cell, the upper one as the colour of a half block."""

    def __init__(self, picture: "Image", classes: str) -> None:
        super().__init__(classes=classes)
        self._picture = picture
        self._drawn: tuple[Size, list[Strip]] = (Size(0, 0), [])

    def get_content_width(self, container: Size, viewport: Size) -> int:
        """As wide as its height allows."""
        height = self.styles.height
        rows = int(height.value) if height is not None and height.cells is not None else container.height
        return min(max(round(2 * rows * self._picture.width / self._picture.height), 1), container.width)

    def render_line(self, y: int) -> Strip:
        """One row of cells; the picture keeps its shape."""
        if self._drawn[0] != self.size:
            self._drawn = self.size, _half_blocks(self._picture, self.size)
        lines = self._drawn[1]
        return lines[y] if y < len(lines) else Strip.blank(self.size.width)


def _half_blocks(picture: "Image", size: Size) -> list[Strip]:
    scale = min(size.width / picture.width, 2 * size.height / picture.height)
    columns, rows = max(round(picture.width * scale), 1), max(round(picture.height * scale / 2), 1)
    pixels = picture.resize((columns, 2 * rows)).tobytes()
    colours = [Color.from_rgb(*pixels[at : at + 3]) for at in range(0, len(pixels), 3)]
    lines = [colours[at : at + columns] for at in range(0, len(colours), columns)]
    return [
        Strip([Segment("▀", Style(color=above, bgcolor=below)) for above, below in zip(upper, lower, strict=True)])
        for upper, lower in zip(lines[::2], lines[1::2], strict=True)
    ]


class Previews(Horizontal):
    """The pictures of a draft above the prompt, before it is sent; what the model will see of each below it."""

    def __init__(self) -> None:
        super().__init__(id="previews")
        self._shown: list[bytes] = []

    def compose(self) -> ComposeResult:
        yield Static("", classes="more", markup=False)

    async def show(self, pictures: Sequence[tuple[str, bytes]]) -> None:
        """Show picture files with captions."""
        self.set_class(bool(pictures) and _drawing is not None, "any")
        shown = [data for _, data in pictures[:MOST_PREVIEWS]]
        if shown != self._shown:
            self._shown = shown
            await self.query(".preview").remove()
            views = [Vertical(DrawnPicture(data), Static("", markup=False), classes="preview") for data in shown]
            await self.mount_all(views, before=".more")
        for view, (caption, _) in zip(self.query(".preview"), pictures, strict=False):
            view.query_one(Static).update(harmless(caption))
        left = len(pictures) - len(shown)
        self.query_one(".more", Static).update(f"and {left} more" if left else "")
