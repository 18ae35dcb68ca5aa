"""Message contents: text and images, from the formats of the protocols."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_offload.pictures import check_picture
from localllm.server.bodies import Message
from localllm.server.errors import ApiError
from localllm.server.limits import MAX_IMAGES

Part = dict[str, Any]

TEXT_ONLY = "only text, and images in user messages, are supported; audio and documents are not"
_NO_FETCHING = (
    "this server does not fetch images; send the image itself, as data:image/png;base64,... or "
    "data:image/jpeg;base64,..."
)


def text_part(text: str) -> Part:
    """A content part with text."""
    return {"type": "text", "text": text}


def image_part(encoded: object) -> Part:
    """A content part with an image, from base64. Raises ApiError 400, PictureError for an image that is not safe."""
    if not isinstance(encoded, str):
        raise ApiError(400, "an image must be a PNG or JPEG in base64")
    text = encoded.partition(",")[2] if encoded.startswith("data:") else encoded
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"an image is not valid base64: {error}") from error
    check_picture(data)
    return {"type": "image", "data": data}


def image_part_of_url(url: object) -> Part:
    """A content part with an image, from a data: URL. Raises ApiError 400, also for other URLs: nothing is fetched."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ApiError(400, _NO_FETCHING)
    head, comma, _ = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ApiError(400, "an image's data: URL must be data:image/png;base64,... or data:image/jpeg;base64,...")
    return image_part(url)


def plain(parts: list[Part]) -> str | list[Part]:
    """A content from parts: their text joined by newlines if there are no images."""
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def check_images(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError 400 for too many images in a conversation."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    count = sum(part["type"] == "image" for content in contents for part in content)
    if count > MAX_IMAGES:
        raise ApiError(400, f"the request has {count} images; at most {MAX_IMAGES} are allowed")


def openai_message(message: Message) -> dict[str, Any]:
    """An OpenAI message as chat templates expect it. Raises ApiError 400 for audio, and for images of other roles."""
    fields: dict[str, Any] = {"role": message.role, "content": openai_content(message.content, message.role)}
    if message.tool_calls:
        fields["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    if reasoning := message.reasoning_content or message.reasoning:
        fields["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if value := getattr(message, key):
            fields[key] = value
    return fields


def openai_content(content: str | list[Part] | None, role: str) -> Any:
    """OpenAI content: text, or parts where a user's has images. Raises ApiError 400 for other kinds of parts."""
    if not isinstance(content, list) or role != "user":
        return openai_text(content)
    return plain([_image(part) or text_part(openai_text([part])) for part in content])


def openai_text(content: str | list[Part] | None) -> str:
    """The text of a content, its parts joined by newlines. Raises ApiError 400 for other kinds of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part.get("text") or part.get("refusal") or ""
        if part.get("type") not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise ApiError(400, TEXT_ONLY)
        texts.append(text)
    return "\n".join(texts)


def _image(part: Part) -> Part | None:
    """The image of an image_url (chat completions) or input_image (responses) part; None for other parts."""
    if part.get("type") not in ("image_url", "input_image"):
        return None
    url = part.get("image_url")
    return image_part_of_url(url.get("url") if isinstance(url, dict) else url)
