"""Pictures by iTerm2's protocol, which WezTerm has too (https://iterm2.com/documentation-images.html).

textual-image draws sixels into the screen at the right place; only what it writes there differs.
"""

import base64
import io
from typing import Any

from PIL.Image import Image
from textual.app import ComposeResult
from textual_image._terminal import get_cell_size
from textual_image.widget import sixel


class InlineImage(sixel.Image, Renderable=sixel._NoopRenderable):
    """A widget for a PIL image."""

    def compose(self) -> ComposeResult:
        """The widget that writes."""
        yield _Inline(self.image)


class _Inline(sixel._ImageSixelImpl):
    def _image_to_sixels(self, image: Image, *_: Any, **__: Any) -> str:
        file, cell = io.BytesIO(), get_cell_size()
        image.save(file, "PNG")
        data = file.getvalue()
        columns, rows = -(-image.width // cell.width), -(-image.height // cell.height)
        fields = f"inline=1;size={len(data)};width={columns};height={rows};doNotMoveCursor=1"
        return f"\x1b]1337;File={fields}:{base64.b64encode(data).decode()}\x07"
