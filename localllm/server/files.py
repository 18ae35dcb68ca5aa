"""Files within requests: their text and the pictures of pages without text, as the model reads them."""

import base64
import binascii
from contextvars import ContextVar

from localllm.extraction import PagePicture, UnreadableError, content_of
from localllm.server.limits import MAX_FILES
from localllm.text import harmless

LONGEST_NAME = 200

READ: ContextVar[list[str] | None] = ContextVar("files", default=None)
"""The names of the files that were read for the current request."""


def sent_file(encoded: object, name: object, media_type: object = None) -> tuple[str, tuple[PagePicture, ...]]:
    """The name and the text of a file, and its pages that are pictures. PDF and DOCX need the extra `documents`.

    encoded: base64, or a data: URL with it. name: not text if it is unknown. Raises UnreadableError.
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
    content = content_of(data, title, media_type)
    return (f"{title}\n{content.text}" if title else content.text), content.pages
