"""PDF files of plain text and drawings, written by hand from ISO 32000-1's file structure."""

from collections.abc import Sequence

DRAWING = "0.2 0.4 0.9 rg 100 100 300 500 re f"  # a blue rectangle: a page without text
BLANK = ""


def pdf_of(pages: Sequence[Sequence[str] | str], size: str = "595 842") -> bytes:
    """A PDF whose pages have these lines of ASCII, or a drawing by operators. size: in points."""
    objects: list[bytes] = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    kids: list[str] = []
    for lines in pages:
        shown = "".join(f"({_escaped(line)}) Tj T*\n" for line in lines)
        drawing = lines if isinstance(lines, str) else f"BT /F1 11 Tf 50 780 Td 14 TL\n{shown}ET"
        objects.append(f"<< /Length {len(drawing)} >>\nstream\n{drawing}\nendstream".encode())
        resources = "<< /Font << /F1 3 0 R >> >>"
        page = f"/MediaBox [0 0 {size}] /Contents {len(objects)} 0 R /Resources {resources}"
        objects.append(f"<< /Type /Page /Parent 2 0 R {page} >>".encode())
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Count {len(pages)} /Kids [{' '.join(kids)}] >>".encode()
    data, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n".encode() + content + b"\nendobj\n"
    entries = b"".join(f"{offset:010} 00000 n \n".encode() for offset in offsets)
    head = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    trailer = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n".encode()
    return data + head + entries + trailer


def _escaped(line: str) -> str:
    return line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
