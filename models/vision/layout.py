"""What an encoder makes of a picture, computed from its size alone: the resized picture, tiles, tokens and marks.

Rules are those of the models' makers; docs/images.md lists where llama.cpp's differ.
"""

import math
from dataclasses import dataclass, field

from gguf_io.errors import LocalLLMError
from gguf_io.media import Size


class PictureSizeError(LocalLLMError):
    """A picture whose shape an encoder cannot take."""


@dataclass(frozen=True, slots=True)
class RowRun:
    """Consecutive rows of embeddings. count: how many, grid included.

    grid: (rows, columns) that M-RoPE numbers, in reading order; None if rows are numbered like tokens. sees_all: rows
    of the run attend to each other in both directions.
    """

    count: int
    grid: tuple[int, int] | None = None
    sees_all: bool = False


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """What becomes of a picture of size `source`.

    resized: the whole picture as the model sees it. tiles: (rows, columns) that it is then cut into; (1, 1) if it is
    encoded as a whole. overview: the size of the picture that is encoded beside tiles, None for none. pieces: texts to
    tokenise, special tokens included, and runs of rows, in the order in which the model reads them.
    """

    source: Size
    resized: Size
    pieces: tuple[str | RowRun, ...]
    tiles: tuple[int, int] = (1, 1)
    overview: Size | None = field(default=None)

    @property
    def runs(self) -> tuple[RowRun, ...]:
        """The runs of rows, in order."""
        return tuple(piece for piece in self.pieces if isinstance(piece, RowRun))

    @property
    def tokens(self) -> int:
        """Rows of embeddings of all runs; the texts' tokens come on top."""
        return sum(run.count for run in self.runs)


def filled_size(source: Size, unit: int, most: int) -> Size:
    """The largest size of about the same shape whose sides are multiples of `unit`, with at most `most` of them.

    Source: get_aspect_ratio_preserving_size of Gemma 4's image processor (transformers).
    """
    width, height = source
    factor = math.sqrt(most * unit**2 / (width * height))
    columns, rows = math.floor(factor * width / unit), math.floor(factor * height / unit)
    if rows == 0:
        rows, columns = 1, min(width // height, most)
    elif columns == 0:
        rows, columns = min(height // width, most), 1
    return columns * unit, rows * unit


def rounded_size(source: Size, unit: int, least: int, most: int) -> Size:
    """The size with sides rounded to multiples of `unit`, scaled to have least..most units of area.

    Source: smart_resize of Qwen's image processors (transformers). Halves are rounded to even multiples.
    """
    width, height = source
    columns, rows = max(1, round(width / unit)), max(1, round(height / unit))
    area = width * height / unit**2
    if columns * rows > most:
        factor = math.sqrt(area / most)
        columns = max(1, math.floor(width / factor / unit))
        rows = max(1, math.floor(height / factor / unit))
        # A thin picture has a side of one unit, which leaves less than the usual room for the other.
        columns, rows = min(columns, most // rows), min(rows, most // columns)
    elif columns * rows < least:
        factor = math.sqrt(least / area)
        columns, rows = math.ceil(width * factor / unit), math.ceil(height * factor / unit)
    return columns * unit, rows * unit


def closest_grid(source: Size, side: int, least: int, most: int) -> tuple[int, int]:
    """The (columns, rows) of least..most tiles whose shape is closest to a picture's.

    Among equal shapes, the largest of whose pixels the picture fills more than half. Source: find_closest_aspect_ratio
    of InternVL.
    """
    width, height = source
    grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    best, difference = (1, 1), math.inf
    for columns, rows in sorted((grid for grid in grids if grid[0] * grid[1] >= least), key=math.prod):
        found = abs(width / height - columns / rows)
        if found < difference or (found == difference and width * height > 0.5 * side**2 * columns * rows):
            best, difference = (columns, rows), found
    return best
