"""Images in requests: the protocols spell them differently, conversations hold their bytes."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_offload.pictures import check_picture
from localllm.server.errors import ApiError
from localllm.server.limits import MAX_IMAGES

Part = dict[str, Any]

_NO_FETCHING = (
    "this server fetches no images from other addresses; send the image itself, as data:image/png;base64,... or "
    "data:image/jpeg;base64,..."
)


def image_part(encoded: object) -> Part:
    """A part of a content from an image's base64. Raises ApiError 400, PictureError for what is no safe picture."""
    if not isinstance(encoded, str):
        raise ApiError(400, "an image is a PNG or JPEG as base64 text")
    text = encoded.partition(",")[2] if encoded.startswith("data:") else encoded
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"an image is not base64: {error}") from error
    check_picture(data)
    return {"type": "image", "data": data}


def image_part_of_url(url: object) -> Part:
    """A part of a content from a data: URL. Raises ApiError 400, also for other URLs, which are never fetched."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ApiError(400, _NO_FETCHING)
    head, comma, _ = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ApiError(400, "an image's data: URL should be data:image/png;base64,... or data:image/jpeg;base64,...")
    return image_part(url)


def text_part(text: str) -> Part:
    """A part of a content that is text."""
    return {"type": "text", "text": text}


def plain(parts: list[Part]) -> str | list[Part]:
    """A content of parts: text where all of them are, one after the other."""
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def check_images(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError 400 for a conversation of too many images."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    count = sum(part["type"] == "image" for content in contents for part in content)
    if count > MAX_IMAGES:
        raise ApiError(400, f"{count} images in one request; at most {MAX_IMAGES} are taken")
