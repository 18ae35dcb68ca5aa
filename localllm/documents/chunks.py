"""Cutting a document's lines into chunks of about the same size, where its text allows it."""

from collections.abc import Iterator, Sequence

TARGET_CHARS = 1200  # some 300 tokens: eight of them are read in a few seconds
LEAST_CHARS = 300  # a heading begins a new chunk after so many


def chunks(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Chunks as (number of the first line from 1, text). Chunks without a letter or digit are left out.

    A chunk ends before a Markdown heading or at a blank line where one is near; a line that is longer than TARGET_CHARS
    is cut into chunks of its own.
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
