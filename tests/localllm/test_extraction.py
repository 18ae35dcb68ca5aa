"""Text extraction from HTML, PDF and DOCX; hostile files of these kinds are left out without harm."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from PIL import Image

from gguf_io import confined
from localllm import extraction
from localllm.extraction import Content, Document, Extractor, UnreadableError, content_of
from tests.pdf_files import BLANK, DRAWING, pdf_of

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
    monkeypatch.setattr(confined, "_BOOTSTRAP", "import sys; print(flush=True); sys.stdin.buffer.read()")
    with pytest.raises(UnreadableError, match=r"takes too long"):
        of(extractor, "a.html", b"<p>x</p>")
    monkeypatch.undo()
    assert of(extractor, "a.html", b"<p>x</p>").pages == (("x",),)


def test_a_reader_that_cannot_start_is_no_fault_of_the_file(
    extractor: Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "_BOOTSTRAP", "raise SystemExit(3)")
    with pytest.raises(UnreadableError, match="ended with status 3 when it started") as caught:
        of(extractor, "a.html", b"<p>x</p>")
    assert not caught.value.lasting


def test_the_reader_has_bounds_of_the_system(extractor: Extractor) -> None:
    of(extractor, "a.html", b"<p>x</p>")
    child = extractor.child.process
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
    child = extractor.child.process
    assert child is not None
    extractor.close()
    assert child.returncode is not None
    assert not psutil.pid_exists(child.pid)


MOST_PIXELS = (2**11 + 1) ** 2  # sides are rounded up


@pytest.fixture
def drawer(extractor: Extractor) -> Extractor:
    pytest.importorskip("pypdf")
    pytest.importorskip("pypdfium2")
    return extractor


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_pages_are_drawn_as_they_are(drawer: Extractor) -> None:
    """The drawing is a rectangle of 300 x 500 points at 100, 100 of a page of 595 x 842."""
    drawn = drawer.draw(pdf_of([["text"], DRAWING, BLANK]), [3, 2])
    assert list(drawn) == [3, 2] and drawn[3] == b""
    image = opened(drawn[2])
    assert image.width / image.height == pytest.approx(595 / 842, abs=0.002)
    assert 0.95 * MOST_PIXELS < image.width * image.height <= MOST_PIXELS
    points = image.width / 595
    inside, outside = image.getpixel((250 * points, 400 * points)), image.getpixel((20, 20))
    assert inside == pytest.approx((51, 102, 230), abs=4) and outside == (255, 255, 255)
    blue = sum(count for count, colour in image.getcolors(1 << 22) or [] if colour[0] < 128)
    assert blue == pytest.approx(300 * 500 * points**2, rel=0.01)


@pytest.mark.parametrize(
    ("size", "most"),
    [
        ("1000000000 1000000000", (2049, 2601)),
        ("0 0", (2049, 2601)),  # PDFium takes Letter
        ("nan inf", (2049, 2601)),
        ("200 9000", (8192, 8192)),
        ("72 72", (300, 300)),  # 300 DPI
    ],
)
def test_pages_of_any_size_have_bounded_pictures(drawer: Extractor, size: str, most: tuple[int, int]) -> None:
    image = opened(drawer.draw(pdf_of(["0 g 0 0 36 99999 re f"], size), [1])[1])
    assert image.width <= most[0] and image.height <= most[1] and image.width * image.height <= MOST_PIXELS


def test_content_is_text_where_there_is_text_and_pictures_where_there_is_none(drawer: Extractor) -> None:
    found = content_of(pdf_of([["one"], DRAWING, BLANK, ["four"]]), "a.pdf")
    assert found.text == "one\n\n[page 2: a picture]\n\n\n\nfour"
    assert [page.page for page in found.pages] == [2]
    assert content_of(pdf_of([BLANK, DRAWING]), "a.pdf").text == ""
    assert content_of(pdf_of([BLANK]), "a.pdf") == Content("")
    many = content_of(pdf_of([DRAWING] * 22 + [["end"]]), "a.pdf")
    assert len(many.pages) == 20
    assert many.text.endswith("end\n[pages without text are left out, 21, 22: only 20 are shown]")


def test_a_file_is_drawn_once(drawer: Extractor, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pdf_of([DRAWING, ["once"]])
    first = content_of(data, "a.pdf")
    monkeypatch.setattr(Extractor, "draw", lambda *_: pytest.fail("drawn again"))
    assert content_of(data, "another.pdf") is first


def test_pages_that_cannot_be_drawn_leave_the_text(drawer: Extractor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[int, bytes]:
        raise UnreadableError("cannot be drawn: it takes too long")

    monkeypatch.setattr(Extractor, "draw", fail)
    mixed = content_of(pdf_of([["words"], DRAWING]), "a.pdf")
    assert mixed.text == "words\n\n\n[pages without text are left out, 2: they cannot be drawn: it takes too long]"
    with pytest.raises(UnreadableError, match=r"^has no text, and its pages cannot be drawn: it takes too long$"):
        content_of(pdf_of([DRAWING, DRAWING]), "a.pdf")


def test_a_drawing_that_takes_too_much_ends_the_child_and_the_next_is_drawn(
    drawer: Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "CPU_SECONDS", 2)
    tiles = "<< /PatternType 1 /PaintType 1 /TilingType 1 /BBox [0 0 1 1] /XStep .0001 /YStep .0001 /Length 20 >>"
    page = "/Pattern cs /P scn 0 0 595 842 re f"
    data = pdf_of([page]).replace(b"/Font << /F1 3 0 R >>", b"/Pattern << /P 3 0 R >>")
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    data = data.replace(font, tiles.encode() + b"\nstream\n0 g 0 0 .5 .5 re f  \nendstream")
    with pytest.raises(UnreadableError, match=r"takes too (long|much memory)"):
        drawer.draw(data, [1])
    assert drawer.draw(pdf_of([DRAWING]), [1])[1]


@pytest.mark.parametrize("data", [b"", b"%PDF-1.7\n%%EOF", pdf_of([DRAWING])[:300], b"\0" * 1000])
def test_pages_that_cannot_be_drawn_give_one_sentence(drawer: Extractor, data: bytes) -> None:
    with pytest.raises(UnreadableError, match=r"^cannot be drawn: "):
        drawer.draw(data, [1])
    with pytest.raises(UnreadableError, match=r"^cannot be drawn: "):
        drawer.draw(pdf_of([DRAWING]), [2])  # it has one page


def test_what_is_missing_to_draw_is_named(extractor: Extractor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UnreadableError, match=r"cannot be drawn without pypdfium2: .* -m pip install pypdfium2"):
        extractor.draw(pdf_of([DRAWING]), [1])
