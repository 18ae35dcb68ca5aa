"""The confined child process that extracts text from HTML, PDF and DOCX.

The kind of a request is "html", "pdf" or "docx", its data the file. The reply is {"pages": [[line, ...], ...], "cut":
why the rest was left out, or ""}, or {"error": text}. A PDF has a list of lines for each page, other formats have one.
"""

import io
import time
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

from gguf_io.confined import Reply, answer_requests

ENOUGH_SECONDS = 15.0  # of CPU time, after which a PDF's other pages are left out
MAX_MEMORY_BYTES = 1 << 30
MAX_CHARS = 4 << 20
MAX_PAGES = 5000
MAX_UNPACKED_BYTES = 64 << 20


def main() -> None:
    """Answer requests until stdin closes."""
    answer_requests(_answer, MAX_MEMORY_BYTES)


def _answer(kind: str, data: bytes) -> Reply:
    try:
        return _KINDS[kind](data)
    except MemoryError:
        raise
    except Exception as error:  # the parent reports whatever a library raises on an untrusted file
        return {"error": f"{type(error).__name__}: {error}"[:300]}


class _HtmlText(HTMLParser):
    """The text of a page, each piece on the line where it is in the file."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self._hidden = 0  # number of open elements whose text is not shown

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style", "template")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= bool(self._hidden) and tag in ("script", "style", "template")

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        for row, piece in enumerate(data.split("\n"), self.getpos()[0] - 1):
            self.lines += [""] * (row + 1 - len(self.lines))
            self.lines[row] += piece if self.lines[row] else piece.lstrip()


def _html(data: bytes) -> Reply:
    parser = _HtmlText()
    parser.feed(data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n"))
    parser.close()
    return {"pages": [parser.lines], "cut": ""}


def _pdf(data: bytes) -> Reply:
    import pypdf

    reader = pypdf.PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        return {"error": "is protected by a password"}
    pages: list[list[str]] = []
    chars, began = 0, time.process_time()
    for number, page in enumerate(reader.pages, 1):
        if number > MAX_PAGES or chars > MAX_CHARS or time.process_time() - began > ENOUGH_SECONDS:
            return {"pages": pages, "cut": f"only its first {number - 1} pages were read"}
        text = page.extract_text()
        chars += len(text)
        pages.append(text.splitlines())
    return {"pages": pages, "cut": ""}


def _docx(data: bytes) -> Reply:
    import docx

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > MAX_UNPACKED_BYTES:  # zipfile reads no more of an entry than it announces
        return {"error": f"unpacks to {size} bytes; {MAX_UNPACKED_BYTES} are allowed"}
    lines: list[str] = []
    chars = 0
    for text in _paragraphs(docx.Document(io.BytesIO(data))):
        lines.append(" ".join(text.split()))
        chars += len(text)
        if chars > MAX_CHARS:
            return {"pages": [lines], "cut": f"only its first {len(lines)} paragraphs were read"}
    return {"pages": [lines], "cut": ""}


def _paragraphs(container: Any) -> Iterator[str]:
    """Texts in document order; a table row is one paragraph."""
    from docx.table import Table

    for block in container.iter_inner_content():
        if isinstance(block, Table):
            for row in block.rows:
                yield " | ".join(cell.text for cell in row.cells)
        else:
            yield block.text


_KINDS = {"html": _html, "pdf": _pdf, "docx": _docx}
