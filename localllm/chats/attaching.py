"""Files as attachments of a message: texts, documents, pictures and sounds."""

import base64
import mimetypes

from gguf_io.errors import PictureError
from gguf_io.media import is_sound
from localllm.chats.records import Attachment
from localllm.errors import RequestError
from localllm.extraction import Content, UnreadableError, content_of, packed_suffix
from localllm.files import decoded

MAX_TEXT_BYTES = 2 << 20
# Magic bytes of PNG, JPEG, WebP, GIF, TIFF and BMP.
_PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"II*\x00", b"MM\x00*", b"BM")


def attachments_of(name: str, data: bytes) -> tuple[Attachment, ...]:
    """A picture or a WAV, or a file's text and the pages of a PDF that are pictures. Their tokens are not counted.

    Documents are read, and pictures and sounds checked, in confined processes. Raises RequestError.
    """
    if is_sound(data):  # silence is UTF-8
        return (medium_of(name, data),)
    if packed_suffix(data, name):
        try:
            content = content_of(data, name)
        except UnreadableError as error:
            raise RequestError(f"{name}: {error}.") from error
        if not content.text.strip() and not content.pages:
            raise RequestError(f"{name}: has no text, and shows nothing.")
        size = len(content.text)
    else:
        try:
            content, size = Content(_text(data)), len(data)
        except UnicodeDecodeError as error:
            if data.startswith(_PICTURES) or (mimetypes.guess_type(name)[0] or "").startswith(("image/", "audio/")):
                return (medium_of(name, data),)
            raise RequestError(
                f"{name}: is not UTF-8 text (byte {error.start}). "
                "Only text, PDF, DOCX, pictures and WAV can be attached."
            ) from error
    if size > MAX_TEXT_BYTES:
        raise RequestError(f"{name}: has more than {MAX_TEXT_BYTES >> 20} MiB of text. Attach a part of it.")
    return Attachment.of_file(name, content)


def medium_of(name: str, data: bytes) -> Attachment:
    """A picture or a WAV. Raises RequestError."""
    from gguf_io import sounds

    try:
        sounds.check(data)
    except PictureError as error:
        raise RequestError(f"{name} cannot be attached. {error}") from error
    return Attachment(name, "", picture=base64.b64encode(data).decode())


def _text(data: bytes) -> str:
    """Raises UnicodeDecodeError, also for a NUL."""
    text = decoded(data)
    if "\0" in text:
        at = data.index(b"\0")
        raise UnicodeDecodeError("utf-8", data, at, at + 1, "NUL")
    return text
