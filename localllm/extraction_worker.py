"""The confined child process that extracts text from HTML, PDF and DOCX, and draws pages of PDF.

The kind of a request is "html", "pdf" or "docx", its data the file. The reply is {"pages": [[line, ...], ...], "cut":
why the rest was left out, or ""}, or {"error": text}. A PDF has a list of lines for each page, other formats have one.

The kind "draw 2 7" asks for pages 2 and 7 of a PDF. The reply is {"sizes": [bytes, ...]}, with the pages as JPEG files
one after the other as raw bytes. An empty page has 0 bytes, and the last pages are missing if they take too much.
"""

import io
import math
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
MAX_PAGE_PIXELS = 4 << 20  # of a drawn page; the finest view of models that read pictures
MAX_PAGE_SIDE = 1 << 13
MAX_DRAWN_BYTES = 16 << 20  # of a file's pages
MAX_SCALE = 300 / 72  # pixels in a point: 300 DPI
JPEG_QUALITY = 90


def main() -> None:
    """Answer requests until stdin closes."""
    answer_requests(_answer, MAX_MEMORY_BYTES)


def _answer(kind: str, data: bytes) -> Reply:
    what, *pages = kind.split()
    try:
        return _drawn(data, list(map(int, pages))) if pages else _KINDS[what](data)
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


def _drawn(data: bytes, wanted: list[int]) -> Reply:
    import pypdfium2

    file = pypdfium2.PdfDocument(data)
    file.init_forms()
    found: list[bytes] = []
    began = time.process_time()
    for number in wanted:
        if time.process_time() - began > ENOUGH_SECONDS or sum(map(len, found)) > MAX_DRAWN_BYTES:
            break
        found.append(_picture(file[number - 1]))
    return {"sizes": list(map(len, found)), "raw": b"".join(found)}


def _picture(page: Any) -> bytes:
    """A page as a JPEG file, as fine as the bounds allow; empty if it shows nothing."""
    width, height = page.get_size()
    if not (0 < width < math.inf and 0 < height < math.inf):
        return b""
    scale = min(math.sqrt(MAX_PAGE_PIXELS / width / height), MAX_PAGE_SIDE / max(width, height), MAX_SCALE)
    image = page.render(scale=scale, rev_byteorder=True).to_pil().convert("RGB")
    if all(darkest == brightest for darkest, brightest in image.getextrema()):
        return b""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return file.getvalue()


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
