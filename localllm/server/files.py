"""Files within requests: their text, as the model reads it."""

import base64
import binascii
from contextvars import ContextVar

from localllm.extraction import UnreadableError, text_of
from localllm.server.limits import MAX_FILES
from localllm.text import harmless

LONGEST_NAME = 200

READ: ContextVar[list[str] | None] = ContextVar("files", default=None)
"""The names of the files that were read for the current request."""


def file_text(encoded: object, name: object, media_type: object = None) -> str:
    """The name and the text of a file. PDF and DOCX need the extra `documents`. Raises UnreadableError.

    encoded: base64, or a data: URL with it. name: not text if it is unknown.
    """
    title = harmless(" ".join(name.split()))[:LONGEST_NAME] if isinstance(name, str) else ""
    if not isinstance(encoded, str) or not encoded:
        raise UnreadableError("is not in the request")
    head, comma, tail = encoded.partition(",")
    if encoded.startswith("data:") and comma:
        media_type, encoded = head.removeprefix("data:").partition(";")[0], tail
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadableError("is not valid base64") from error
    read = READ.get()
    if read is not None:
        if len(read) >= MAX_FILES:
            raise UnreadableError(f"is more than the {MAX_FILES} files that are read of a request")
        read.append(title)
    text = text_of(data, title, media_type)
    return f"{title}\n{text}" if title else text
