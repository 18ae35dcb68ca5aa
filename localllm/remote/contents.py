"""Messages in OpenAI's shape: an image among their parts goes as a data: URL.

https://platform.openai.com/docs/guides/images-vision#analyze-images
"""

import base64
from collections.abc import Iterable, Mapping
from typing import Any

_PNG = b"\x89PNG"


def spelt(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message with its parts {"type": "image", "data": bytes}, PNG or JPEG, as the protocol spells them."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    return {**message, "content": [*_parts(content)]}


def _parts(content: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    for part in content:
        yield _image(part["data"]) if part.get("type") == "image" else dict(part)


def _image(data: bytes) -> dict[str, Any]:
    kind = "png" if data.startswith(_PNG) else "jpeg"
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}}
