"""Extracts a file's text (plain text here, other formats in a child process), and splits it into chunks."""

import codecs
import hashlib
import importlib.util
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from gguf_io.confined import ChildEndedError, ConfinedChild
from gguf_io.system import NotRegularError, open_regular
from localllm.errors import LocalLLMError
from localllm.extraction_worker import MAX_MEMORY_BYTES
from localllm.files import decoded
from localllm.text import shortened

MAX_TEXT_BYTES = 4 << 20
MAX_PACKED_BYTES = 64 << 20  # of a PDF or DOCX
CPU_SECONDS = 30.0  # for a file
WALL_SECONDS = 2 * CPU_SECONDS
TARGET_CHARS = 1200  # some 300 tokens: eight chunks are computed in a few seconds
LEAST_CHARS = 300  # a heading begins a new chunk if the current one has at least this many
_BINARY_BYTES = 8192  # of a file's beginning are searched for a NUL
_KINDS = {".html": "html", ".htm": "html", ".xhtml": "html", ".pdf": "pdf", ".docx": "docx"}
_LIBRARIES = {"pdf": ("pypdf", "pypdf"), "docx": ("docx", "python-docx")}  # modules, and packages that have them
MOST_KEPT_CHARS = 16 << 20  # of texts that were read before
_SUFFIXES = {
    "application/pdf": ".pdf",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ".docx",
}


class UnreadableError(LocalLLMError):
    """A file has no text that can be read. The message says why, without the file's name.

    lasting: whether it remains so until the file changes.
    """

    def __init__(self, message: str, lasting: bool = True) -> None:
        super().__init__(message)
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class Document:
    """A file's text. pages: lines; other formats than PDF have one page. cut: what was left out, or ""."""

    pages: tuple[tuple[str, ...], ...]
    is_paged: bool = False
    cut: str = ""


def read_file(path: Path) -> tuple[bytes, str]:
    """A file's content and its digest. Raises UnreadableError for links, special files and files that are too large."""
    most = MAX_PACKED_BYTES if _KINDS.get(path.suffix.lower()) in _LIBRARIES else MAX_TEXT_BYTES
    try:
        # The walk found a regular file, so a link would have been put there since.
        with open(open_regular(path, follow_links=False), "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise UnreadableError(f"is larger than {most >> 20} MiB")
            data = file.read(most + 1)
    except NotRegularError as error:
        raise UnreadableError("is not a regular file") from error
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}", lasting=False) from error
    return data, hashlib.blake2b(data, digest_size=16).hexdigest()


class Extractor:
    """Extracts text from files. For one thread at a time; `close` ends its child process."""

    def __init__(self) -> None:
        self._child = ConfinedChild("localllm.extraction_worker", MAX_MEMORY_BYTES)

    def extract(self, path: PurePath, data: bytes) -> Document:
        """The text of a file's content. Raises UnreadableError."""
        kind = _KINDS.get(path.suffix.lower())
        if kind is None:
            return Document((tuple(_lines(_decoded(data))),))
        if kind in _LIBRARIES:
            module, package = _LIBRARIES[kind]
            if importlib.util.find_spec(module) is None:
                install = f"{sys.executable} -m pip install {package}"
                raise UnreadableError(f"needs {package}: {install}", lasting=False)
        try:
            reply = self._child.ask(kind, data, CPU_SECONDS, WALL_SECONDS)
        except ChildEndedError as error:
            raise UnreadableError(f"cannot be read as {kind.upper()}: {error}") from None
        if "error" in reply:
            raise UnreadableError(f"cannot be read as {kind.upper()}: {shortened(str(reply['error']), 200)}")
        return Document(tuple(map(tuple, reply["pages"])), is_paged=kind == "pdf", cut=reply["cut"])

    def close(self) -> None:
        """End the child process. Idempotent."""
        self._child.close()


def packed_suffix(data: bytes, name: str, media_type: object = None) -> str:
    """ ".pdf" or ".docx" for the content of such a file, by its media type or its name; "" for any other."""
    if data.startswith(b"%PDF-"):
        return ".pdf"
    suffix = PurePath(name).suffix.lower()
    return _SUFFIXES.get(str(media_type), suffix if suffix in _SUFFIXES.values() else "")


def text_of(data: bytes, name: str, media_type: object = None) -> str:
    """The text of a file's content; pages are separated by blank lines. Raises UnreadableError."""
    return _TEXTS.of(data, packed_suffix(data, name, media_type) or ".txt")


class _Texts:
    """Texts of files, by content, since each turn of a conversation sends its files again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one file is read at a time
        self._extractor = Extractor()
        self._found: OrderedDict[str, str | UnreadableError] = OrderedDict()

    def of(self, data: bytes, suffix: str) -> str:
        """A file's text. Raises UnreadableError."""
        key = suffix + hashlib.sha256(data).hexdigest()
        with self._lock:
            found = self._found.pop(key, None) or self._extracted(data, suffix)
            if isinstance(found, str) or found.lasting:
                self._found[key] = found
            while sum(len(str(one)) for one in self._found.values()) > MOST_KEPT_CHARS:
                self._found.popitem(last=False)
        if isinstance(found, UnreadableError):
            raise UnreadableError(str(found), found.lasting)
        return found

    def _extracted(self, data: bytes, suffix: str) -> str | UnreadableError:
        try:
            document = self._extractor.extract(PurePath(f"file{suffix}"), data)
        except UnreadableError as error:
            return error
        text = "\n\n".join("\n".join(lines) for lines in document.pages)
        return text + (f"\n[the rest is left out: {document.cut}]" if document.cut else "")


_TEXTS = _Texts()


def _decoded(data: bytes) -> str:
    """The text of a plain file. Raises UnreadableError."""
    if b"\0" in data[:_BINARY_BYTES] and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UnreadableError("is not text")
    try:
        return decoded(data)
    except UnicodeDecodeError as error:
        raise UnreadableError("is not UTF-8 text") from error


def _lines(text: str) -> list[str]:
    """Lines as editors count them: str.splitlines would also split at form feeds and other characters."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def chunks(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Chunks as (number of the first line from 1, text). Chunks without a letter or digit are left out.

    A chunk ends before a Markdown heading, or at a blank line if one is near; a line that is much longer than
    TARGET_CHARS is split into chunks of its own.
    """
    start = size = 0
    blank: int | None = None
    for index, line in enumerate(lines):
        heading = line.startswith("#") and size >= LEAST_CHARS
        if index > start and (size + len(line) > TARGET_CHARS or heading):
            end = index if heading or blank is None else blank
            yield from _chunk(lines, start, end)
            start, blank = end, None
            size = sum(len(each) + 1 for each in lines[start:index])
        size += len(line) + 1
        if not line.strip() and size >= TARGET_CHARS // 2:
            blank = index + 1
    yield from _chunk(lines, start, len(lines))


def _chunk(lines: Sequence[str], start: int, end: int) -> Iterator[tuple[int, str]]:
    while start < end and not lines[start].strip():
        start += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    text = "\n".join(lines[start:end])
    if len(text) <= 2 * TARGET_CHARS:
        if any(letter.isalnum() for letter in text):
            yield start + 1, text
        return
    for row in range(start, end):  # one very long line, or a short one before it
        for at in range(0, len(lines[row]), TARGET_CHARS):
            piece = lines[row][at : at + TARGET_CHARS]
            if any(letter.isalnum() for letter in piece):
                yield row + 1, piece
