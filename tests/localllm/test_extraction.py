"""Text extraction from HTML, PDF and DOCX; hostile files of these kinds are left out without harm."""

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_io import confined
from localllm import extraction
from localllm.extraction import Document, Extractor, UnreadableError
from tests.pdf_files import pdf_of

WEB_PAGE = """\
<html><head><title>Ships</title>
<script>let needle = "<p>no text</p>";</script>
<style>p { color: red }</style></head>
<body><p>The <b>harbour</b> &amp; the crane
are open.</p>
</body></html>
"""


@pytest.fixture
def extractor() -> Iterator[Extractor]:
    found = Extractor()
    yield found
    found.close()


def of(extractor: Extractor, name: str, data: bytes) -> Document:
    return extractor.extract(Path(name), data)


def test_text_of_a_web_page_stays_on_its_lines(extractor: Extractor) -> None:
    lines = of(extractor, "a.html", WEB_PAGE.encode()).pages[0]
    assert [line.strip() for line in lines] == [
        "Ships", "", "", "The harbour & the crane", "are open.", "", *([""] * (len(lines) - 6)),
    ]  # fmt: skip


def test_lines_end_as_editors_count_them(extractor: Extractor) -> None:
    assert of(extractor, "a.txt", b"a\r\nb\rc\x0cd\x85\ne".replace(b"\x85", "\u2028".encode())).pages == (
        ("a", "b", "c\x0cd\u2028", "e"),
    )


def test_paragraphs_and_tables_of_a_docx(extractor: Extractor) -> None:
    docx = pytest.importorskip("docx")
    document = docx.Document()
    document.add_paragraph("Dear all,")
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "pier", "3"
    document.add_paragraph("bye")
    data = io.BytesIO()
    document.save(data)
    assert of(extractor, "a.docx", data.getvalue()).pages == (("Dear all,", "pier | 3", "bye"),)


def test_a_zip_bomb_is_refused_by_what_it_announces(extractor: Extractor) -> None:
    pytest.importorskip("docx")
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b"\0" * (65 << 20))
    assert len(data.getvalue()) < 100_000
    with pytest.raises(UnreadableError, match="unpacks to"):
        of(extractor, "a.docx", data.getvalue())


def test_entities_that_grow_are_not_expanded(extractor: Extractor) -> None:
    docx = pytest.importorskip("docx")
    made = io.BytesIO()
    docx.Document().save(made)
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 100}">' for n in range(1, 6))
    body = "<w:p><w:r><w:t>&e5;</w:t></w:r></w:p>"
    bomb = (
        f'<?xml version="1.0"?><!DOCTYPE w [<!ENTITY e0 "needle">{entities}]>'
        '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
        f"<w:body>{body}</w:body></w:document>"
    )
    data = io.BytesIO()
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(data, "w") as new:
        for entry in old.infolist():
            new.writestr(entry, bomb if entry.filename == "word/document.xml" else old.read(entry))
    try:
        pages = of(extractor, "a.docx", data.getvalue()).pages
    except UnreadableError:
        return
    assert "needle" not in str(pages)


@pytest.mark.parametrize("name", ["a.pdf", "a.docx", "a.html"])
@pytest.mark.parametrize("data", [b"", b"rubbish", b"%PDF-1.4\n" + b"\xff" * 1000, b"PK\3\4" + b"\0" * 100])
def test_damaged_files_are_reported_and_the_next_one_is_read(extractor: Extractor, name: str, data: bytes) -> None:
    pytest.importorskip("pypdf")
    pytest.importorskip("docx")
    try:
        of(extractor, name, data)
    except UnreadableError as error:
        assert "cannot be read as" in str(error)
    assert of(extractor, "b.pdf", pdf_of([["fine"]])).pages == (("fine",),)


def test_pages_beyond_the_limit_are_left_out_and_reported(extractor: Extractor) -> None:
    pytest.importorskip("pypdf")
    data = pdf_of([["word " * 200] * 45] * 100)
    document = of(extractor, "a.pdf", data)
    assert len(document.pages) < 100
    assert document.cut == f"only its first {len(document.pages)} pages were read"


def test_a_reader_that_takes_too_long_is_ended_and_started_again(
    extractor: Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "WALL_SECONDS", 0.5)
    monkeypatch.setattr(confined, "_BOOTSTRAP", "import sys; sys.stdin.buffer.read()")
    with pytest.raises(UnreadableError, match="takes too long"):
        of(extractor, "a.html", b"<p>x</p>")
    monkeypatch.undo()
    assert of(extractor, "a.html", b"<p>x</p>").pages == (("x",),)


def test_the_reader_has_bounds_of_the_system(extractor: Extractor) -> None:
    of(extractor, "a.html", b"<p>x</p>")
    child = extractor._child.process
    assert child is not None
    limits = Path(f"/proc/{child.pid}/limits")
    if not limits.exists():
        pytest.skip("needs Linux")
    rows = {line[:26].strip(): line[26:].split() for line in limits.read_text().splitlines()}
    assert rows["Max file size"][:2] == ["0", "0"]
    assert int(rows["Max address space"][0]) <= 1 << 30
    assert rows["Max processes"][:2] == ["0", "0"]


def test_closing_ends_the_child(extractor: Extractor) -> None:
    of(extractor, "a.html", b"<p>x</p>")
    child = extractor._child.process
    assert child is not None
    extractor.close()
    assert child.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
