"""Extracts a file's text (plain text here, other formats in a child process), and splits it into chunks.

Pages of a PDF that have no text, such as scanned ones, become pictures.
"""

import codecs
import hashlib
import importlib.util
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from gguf_io.confined import ChildEndedError, ChildNotStartedError, ConfinedChild, Reply
from gguf_io.system import NotRegularError, open_regular, pip_line
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
MAX_DRAWN = 20  # pages of a PDF that become pictures
MOST_KEPT_BYTES = 64 << 20  # of texts and pictures of files that were read before
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

    @property
    def without_text(self) -> list[int]:
        """The numbers of the pages that have no text, from 1; they may show something."""
        return [
            number for number, lines in enumerate(self.pages, 1) if self.is_paged and not any(map(_has_words, lines))
        ]


@dataclass(frozen=True, slots=True)
class PagePicture:
    """A page of a PDF as a JPEG file. page: its number, from 1."""

    page: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Content:
    """A file's content for a model. text: of its pages, with marks in place of those that are pictures."""

    text: str
    pages: tuple[PagePicture, ...] = ()


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
    """Extracts text from files, and draws pages. For one thread at a time; `close` ends its child process."""

    def __init__(self) -> None:
        self.child = ConfinedChild("localllm.extraction_worker", MAX_MEMORY_BYTES)

    def extract(self, path: PurePath, data: bytes) -> Document:
        """The text of a file's content. Raises UnreadableError."""
        kind = _KINDS.get(path.suffix.lower())
        if kind is None:
            return Document((tuple(_lines(_decoded(data))),))
        if kind in _LIBRARIES:
            module, package = _LIBRARIES[kind]
            _require(module, package, f"needs {package}")
        reply = self._asked(kind, data, f"cannot be read as {kind.upper()}")
        return Document(tuple(map(tuple, reply["pages"])), is_paged=kind == "pdf", cut=reply["cut"])

    def draw(self, data: bytes, pages: Sequence[int]) -> dict[int, bytes]:
        """Pages of a PDF as JPEG files by their numbers, which count from 1; empty ones are b"".

        The last ones are missing if they take too much. Raises UnreadableError.
        """
        _require("pypdfium2", "pypdfium2", "cannot be drawn without pypdfium2")
        reply = self._asked(" ".join(["draw", *map(str, pages)]), data, "cannot be drawn")
        files = io.BytesIO(reply.get("raw", b""))
        return {page: files.read(size) for page, size in zip(pages, reply["sizes"], strict=False)}

    def _asked(self, kind: str, data: bytes, failed: str) -> Reply:
        try:
            reply = self.child.ask(kind, data, CPU_SECONDS, WALL_SECONDS)
        except ChildEndedError as error:
            raise UnreadableError(f"{failed}: {error}", lasting=not isinstance(error, ChildNotStartedError)) from None
        if "error" in reply:
            raise UnreadableError(f"{failed}: {shortened(str(reply['error']), 200)}")
        return reply

    def close(self) -> None:
        """End the child process. Idempotent."""
        self.child.close()


def packed_suffix(data: bytes, name: str, media_type: object = None) -> str:
    """ ".pdf" or ".docx" for the content of such a file, by its media type or its name; "" for any other."""
    if data.startswith(b"%PDF-"):
        return ".pdf"
    suffix = PurePath(name).suffix.lower()
    return _SUFFIXES.get(str(media_type), suffix if suffix in _SUFFIXES.values() else "")


def content_of(data: bytes, name: str, media_type: object = None) -> Content:
    """The content of a file; pages of text are separated by blank lines. Raises UnreadableError."""
    return _CONTENTS.of(data, packed_suffix(data, name, media_type) or ".txt")


def pages_of(data: bytes, pages: Sequence[int]) -> tuple[PagePicture, ...]:
    """Pages of a PDF as pictures, without those that are empty or take too much. Raises UnreadableError."""
    return _CONTENTS.drawn(data, pages)


class _Contents:
    """Contents of files that were read, since each turn of a conversation sends its files again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one file is read at a time
        self._extractor = Extractor()
        self._found: OrderedDict[str, Content | UnreadableError] = OrderedDict()

    def of(self, data: bytes, suffix: str) -> Content:
        """A file's content. Raises UnreadableError."""
        return self._kept(suffix, data, lambda: self._extracted(data, suffix))

    def drawn(self, data: bytes, pages: Sequence[int]) -> tuple[PagePicture, ...]:
        """See pages_of."""
        return self._kept(str(pages), data, lambda: Content("", _pictures(self._extractor.draw(data, pages)))).pages

    def _kept(self, what: str, data: bytes, read: Callable[[], Content]) -> Content:
        """What was read of a file, or is read now. Raises UnreadableError."""
        key = what + hashlib.sha256(data).hexdigest()
        with self._lock:
            found = self._found.pop(key, None) or _result(read)
            if isinstance(found, Content) or found.lasting:
                self._found[key] = found
            while sum(map(_size, self._found.values())) > MOST_KEPT_BYTES:
                self._found.popitem(last=False)
        if isinstance(found, UnreadableError):
            raise UnreadableError(str(found), found.lasting)
        return found

    def _extracted(self, data: bytes, suffix: str) -> Content:
        document = self._extractor.extract(PurePath(f"file{suffix}"), data)
        texts = ["\n".join(lines) for lines in document.pages]
        blank, why = document.without_text, ""
        drawn: dict[int, bytes] = {}
        try:
            drawn = self._extractor.draw(data, blank[:MAX_DRAWN]) if blank else {}
        except UnreadableError as error:
            if len(blank) == len(texts):
                raise UnreadableError(f"has no text, and its pages {error}", error.lasting) from error
            why = f"they {error}"
        for page in blank:
            texts[page - 1] = f"[page {page}: a picture]" if drawn.get(page) else ""
        cut = [f"the rest is left out: {document.cut}"] if document.cut else []
        if missing := [str(page) for page in blank if page not in drawn]:
            why = why or f"only {len(drawn)} are shown"
            cut.append(f"pages without text are left out, {', '.join(missing)}: {why}")
        text = "\n\n".join(texts) if len(blank) < len(texts) else ""
        return Content("\n".join(filter(None, [text, *(f"[{one}]" for one in cut)])), _pictures(drawn))


_CONTENTS = _Contents()


def _result(read: Callable[[], Content]) -> Content | UnreadableError:
    try:
        return read()
    except UnreadableError as error:
        return error


def _pictures(drawn: Mapping[int, bytes]) -> tuple[PagePicture, ...]:
    return tuple(PagePicture(page, picture) for page, picture in drawn.items() if picture)


def _size(found: Content | UnreadableError) -> int:
    """In bytes, about."""
    if isinstance(found, UnreadableError):
        return len(str(found))
    return len(found.text) + sum(len(page.data) for page in found.pages)


def _require(module: str, package: str, failed: str) -> None:
    """Raise UnreadableError if an optional library is not there."""
    if importlib.util.find_spec(module) is None:
        raise UnreadableError(f"{failed}: {pip_line('install', package)}", lasting=False)


def _has_words(line: str) -> bool:
    return any(letter.isalnum() for letter in line)


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
        if _has_words(text):
            yield start + 1, text
        return
    for row in range(start, end):  # one very long line, or a short one before it
        for at in range(0, len(lines[row]), TARGET_CHARS):
            piece = lines[row][at : at + TARGET_CHARS]
            if _has_words(piece):
                yield row + 1, piece
