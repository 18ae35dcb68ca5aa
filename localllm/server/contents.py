"""Message contents: text, images and sounds, parsed from the protocols' formats."""

import base64
import binascii
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from gguf_io import sounds
from gguf_io.errors import PictureError
from gguf_io.media import is_sound
from localllm.answer.placeholders import NOTE, without_images
from localllm.answer.request import AnswerRequest
from localllm.bounded_json import parsed
from localllm.extraction import UnreadableError
from localllm.server.bodies import OpenAIMessage, OpenAIToolCall, note_ignored, shown
from localllm.server.errors import ApiError
from localllm.server.fetching import FETCHER
from localllm.server.files import sent_file
from localllm.server.limits import MAX_IMAGES, MAX_READ_IMAGES

Part = dict[str, Any]

_NO_FETCHING = "this server does not fetch images; send the image itself, such as data:image/png;base64,..."
_FETCHED = ("http://", "https://")


@dataclass(slots=True)
class ImageReading:
    """The images of the current request. fetches: whether those at URLs are fetched. images: read so far."""

    fetches: bool = False
    images: int = 0


READING: ContextVar[ImageReading | None] = ContextVar("reading", default=None)


def left_out(kind: str) -> str:
    """The note that the model reads in place of content that cannot be passed on."""
    return f"[{kind}: left out, since this server passes on only text here]"


def as_arguments(given: str | dict[str, Any]) -> str | dict[str, Any]:
    """The arguments of an earlier tool call. If the model wrote no valid JSON object, its text is wrapped in one."""
    try:
        found = parsed(given or "{}") if isinstance(given, str) else given
    except ValueError:
        found = None
    if isinstance(found, dict):
        return given
    note_ignored("arguments of an earlier tool call that are not a JSON object; the model reads them as text")
    return {"malformed": given}


def sound_part(about: object) -> Part:
    """A content part with the WAV file of OpenAI's input_audio, or the note that replaces anything else.

    Raises ApiError 400 and PictureError for an unsafe WAV file.
    """
    encoded = about.get("data") if isinstance(about, dict) else None
    try:
        data = _decoded(encoded) if isinstance(encoded, str) else b""
    except ApiError:  # the note tells the model and the client
        data = b""
    if is_sound(data):
        return _checked(data)
    note_ignored("part of type 'input_audio' that is no WAV file")
    return text_part(left_out("input_audio"))


def text_part(text: str) -> Part:
    """A content part with text."""
    return {"type": "text", "text": text}


def image_part(encoded: object) -> Part:
    """A content part with an image or, as in Ollama, a WAV, from base64 or a URL.

    Raises ApiError 400, PictureError for an unsafe one.
    """
    if not isinstance(encoded, str):
        raise ApiError(400, "an image must be base64 text")
    if encoded.startswith(_FETCHED):
        return image_part_of_url(encoded)
    return _checked(_decoded(encoded))


def _decoded(encoded: str) -> bytes:
    """Base64, or that of a data URL. Raises ApiError 400."""
    text = encoded.partition(",")[2] if encoded.startswith("data:") else encoded
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"an image is not valid base64: {error}") from error


def _checked(data: bytes) -> Part:
    """An image's part. Raises PictureError, and ApiError 400 for the first image too many, before reading it."""
    reading = READING.get()
    if reading is not None:
        if reading.images >= MAX_READ_IMAGES:
            raise ApiError(400, f"the request has more than {MAX_READ_IMAGES:,} images")
        reading.images += 1
    sounds.check(data)
    return {"type": "image", "data": data}


def image_part_of_url(url: object, detail: object = None) -> Part:
    """A content part with an image, from a data: URL, or another one if a setting allows it. Raises as image_part.

    detail: OpenAI's; low and high change how many tokens the image takes.
    """
    part = _part_of_url(url)
    return {**part, "detail": detail} if detail in ("low", "high") else part


def _part_of_url(url: object) -> Part:
    reading = READING.get()
    if isinstance(url, str) and url.lower().startswith(_FETCHED) and reading is not None and reading.fetches:
        if reading.images >= MAX_IMAGES:
            raise ApiError(400, f"at most {MAX_IMAGES} images of a request are fetched")
        return _checked(FETCHER.fetch(url))
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ApiError(400, _NO_FETCHING)
    head, comma, _ = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ApiError(400, "an image's data: URL must be in base64, such as data:image/png;base64,...")
    return image_part(url)


def noted_image(read: Callable[[], Part]) -> Part:
    """An image in a tool's result, with the note that replaces it if the image is dropped; or only the note.

    The user cannot change what a tool has sent, so an unreadable image is not an error.
    """
    note = left_out("image")
    try:
        return {**read(), NOTE: note}
    except (ApiError, PictureError) as error:
        note_ignored(f"an image in a tool's result: {error}")
        return text_part(note)


def text_field(what: str, holder: Mapping[str, Any], key: str) -> str:
    """A field that must be text. what: names the holder in the error. Raises ApiError 400."""
    value = holder.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"{what} of type {str(holder.get('type'))[:32]} needs {key} as text")
    return value


def plain(parts: list[Part]) -> str | list[Part]:
    """A content from parts: their text joined by newlines if there are no images."""
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def with_few_images(request: AnswerRequest) -> AnswerRequest:
    """The request with at most MAX_IMAGES images: notes replace the oldest ones in tools' results.

    Many are replaced at once, so that most further images leave the prompt's prefix unchanged. Raises ApiError 400 if
    the user's own images exceed the limit.
    """
    contents = [message["content"] for message in request.messages if isinstance(message.get("content"), list)]
    images = [part for content in contents for part in content if part["type"] == "image"]
    own = sum(NOTE not in part for part in images)
    if own > MAX_IMAGES:
        raise ApiError(400, f"the request has {own} images; at most {MAX_IMAGES} are allowed")
    if len(images) <= MAX_IMAGES:
        return request
    step = max((MAX_IMAGES - own) // 2, 1)
    surplus = -(-(len(images) - MAX_IMAGES) // step) * step
    return replace(request, messages=without_images(request.messages, surplus))


def openai_message(message: OpenAIMessage) -> dict[str, Any]:
    """An OpenAI message as chat templates expect it. Raises what openai_content raises."""
    fields: dict[str, Any] = {"role": message.role, "content": openai_content(message.content, message.role)}
    if message.role == "function":  # a call's result in the older form, before tools
        fields["role"] = "tool"
    if message.tool_calls:
        fields["tool_calls"] = [_call(call) for call in message.tool_calls]
    elif message.function_call:
        fields["tool_calls"] = [_call(OpenAIToolCall(function=message.function_call))]
    if reasoning := message.reasoning_content or message.reasoning:
        fields["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if value := getattr(message, key):
            fields[key] = value
    return fields


def _call(call: OpenAIToolCall) -> dict[str, Any]:
    """A tool call as chat templates expect it. A custom tool's text becomes the argument `input`."""
    if call.custom is not None:
        function: dict[str, Any] = {"name": call.custom.name, "arguments": {"input": call.custom.input}}
    elif call.function is not None:
        function = {"name": call.function.name, "arguments": as_arguments(call.function.arguments)}
    else:
        raise ApiError(400, "a tool call needs a function or a custom tool")
    return {**({"id": call.id} if call.id is not None else {}), "type": "function", "function": function}


def openai_content(content: str | list[Part] | None, role: str) -> Any:
    """OpenAI content as text, or as parts if a user's message or a tool's result has images.

    Files are read as text. A note replaces what cannot be read, and images of other roles. Raises ApiError 400 and
    PictureError for a user's image that cannot be used.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return plain(list(chain.from_iterable(_parts(part, role) for part in content)))


def _parts(part: Any, role: str) -> list[Part]:
    """A part of a message, and the pages of a file that are pictures."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("text") or part.get("refusal") or ""
        if not isinstance(text, str):
            raise ApiError(400, f"a part of type {kind} needs text")
        return [text_part(text)]
    is_stored = isinstance(part, dict) and part.get("file_id") and not part.get("image_url")  # at OpenAI
    if kind in ("image_url", "input_image") and role in ("user", "tool") and not is_stored:
        about = part.get("image_url")
        about = about if isinstance(about, dict) else {"url": about, "detail": part.get("detail")}
        url, detail = about.get("url"), about.get("detail")
        if role == "user":
            return [image_part_of_url(url, detail)]
        return [noted_image(lambda: image_part_of_url(url, detail))]
    if kind == "input_audio" and role == "user":
        return [sound_part(part.get("input_audio"))]
    if kind in ("file", "input_file"):
        about = part.get("file") if isinstance(part.get("file"), dict) else part
        return file_parts(about.get("file_data"), about.get("filename"), sees=role in ("user", "tool"))
    return [_note("part", str(kind)[:64] if kind is not None else "part")]


def file_parts(
    encoded: object, name: object, media_type: object = None, kind: str = "file", sees: bool = True
) -> list[Part]:
    """The text of a file in base64, and its pages that are pictures, or the note that replaces it.

    kind: what the note calls it. sees: whether the message may have images; otherwise notes replace the pages.
    """
    try:
        text, pages = sent_file(encoded, name, media_type)
    except UnreadableError as error:
        why = str(error).partition(":")[0]  # without the command that would install a library
        note_ignored(f"a file that {why}")
        return [text_part(left_out(kind))]
    notes = [text_part(left_out(f"page {page.page} of the {kind}, a picture")) for page in pages]
    shown = [{"type": "image", "data": page.data, NOTE: note["text"]} for page, note in zip(pages, notes, strict=True)]
    return [*([text_part(text)] if text or not pages else []), *(shown if sees else notes)]


def _note(what: str, kind: str) -> Part:
    note_ignored(f"{what} of type {shown(kind)}")
    return text_part(left_out(kind))
