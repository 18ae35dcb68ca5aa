"""Files within requests: their text, as the model reads it."""

import base64
import binascii
import hashlib
import threading
from collections import OrderedDict
from contextvars import ContextVar
from pathlib import PurePath

from localllm.extraction import Extractor, UnreadableError
from localllm.server.limits import MAX_FILES
from localllm.text import harmless

LONGEST_NAME = 200
MOST_KEPT_CHARS = 16 * 2**20  # of texts that were read before

READ: ContextVar[list[str] | None] = ContextVar("files", default=None)
"""The names of the files that were read for the current request."""

_SUFFIXES = {
    "application/pdf": ".pdf",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ".docx",
}


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
    text = _TEXTS.of(data, _suffix(data, title, media_type))
    return f"{title}\n{text}" if title else text


def text_of(data: bytes, name: str) -> str:
    """The text of a file's content. Raises UnreadableError."""
    return _TEXTS.of(data, _suffix(data, name, None))


def _suffix(data: bytes, name: str, media_type: object) -> str:
    """The suffix by which a file's format is known; ".txt" for text of any kind."""
    if data.startswith(b"%PDF-"):
        return ".pdf"
    found = PurePath(name).suffix.lower()
    return _SUFFIXES.get(str(media_type), found if found in _SUFFIXES.values() else ".txt")


class _Texts:
    """Texts of files, by content, since each turn of a conversation sends its files again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one file is read at a time
        self._extractor = Extractor()
        self._found: OrderedDict[str, str] = OrderedDict()

    def of(self, data: bytes, suffix: str) -> str:
        """A file's text. Raises UnreadableError."""
        key = suffix + hashlib.sha256(data).hexdigest()
        with self._lock:
            text = self._found.pop(key, None)
            if text is None:
                document = self._extractor.extract(PurePath(f"file{suffix}"), data)
                text = "\n\n".join("\n".join(lines) for lines in document.pages)
                text += f"\n[the rest is left out: {document.cut}]" if document.cut else ""
            self._found[key] = text
            while sum(map(len, self._found.values())) > MOST_KEPT_CHARS:
                self._found.popitem(last=False)
            return text


_TEXTS = _Texts()
