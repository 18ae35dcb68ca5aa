"""Sizes that all parts of attention agree on, and how a step of it is cut."""

from collections.abc import Iterable, Sequence

from cpu_kernels.isa import POLICY
from cpu_kernels.kv_types import PAGE_TOKENS

MAX_COLUMNS = 16
"""A column is one query head of one row; so many of them share a pass over a key-value head."""

SPAN_PAGES = 16
SPAN_TOKENS = SPAN_PAGES * PAGE_TOKENS
SPAN_BYTES = SPAN_TOKENS * 4
"""Tokens that a softmax is taken over before it is merged with others. Spans are counted from position 0."""

# Vectors of sums that are worked on side by side. On AVX2 a vector takes two of sixteen registers, and the sums of four
# leave room for their operands; fewer would wait for the additions before them.
VECTORS = POLICY.attention_vectors
WIDTHS = tuple(width for width in (1, 2, 4, 8) if width <= VECTORS)
"""Columns that a tile of sums may have; its rows are pages of keys, or vectors of values."""


def rows_of(columns: int) -> int:
    """Vectors that meet `columns` columns. A single one would have each column's value loaded for one product."""
    return max(VECTORS // columns, 2) if POLICY.vector_parts == 1 else VECTORS // columns


HEADER_BYTES = 64 + 8 * MAX_COLUMNS
"""Before the outputs of a span: a counter, and the maxima and sums of all columns."""
MAXIMA, SUMS = 64, 64 + 4 * MAX_COLUMNS

# With fewer tiles of attention than this, threads would wait for the one with the longest.
_TILES_A_THREAD = 8


def parts_bytes(spans: int, padded: int) -> int:
    """Room for the results of so many spans."""
    return spans * (HEADER_BYTES + MAX_COLUMNS * padded * 4)


def tiles_of(rows: int, group: int) -> int:
    """Tiles of a segment for one key-value head."""
    together = max(1, MAX_COLUMNS // group)
    return -(-rows // together) * -(-group // MAX_COLUMNS)


def spans_of(tokens: int) -> int:
    """Spans of so many tokens, the most that a tile of them is split into."""
    return -(-tokens // SPAN_TOKENS)


def shared_spans(kinds: Iterable[tuple[int, int]], segments: Sequence[tuple[int, int]], threads: int) -> int:
    """The most spans of a layer in a step that threads share out by spans; 0 for a step that they share out by tiles.

    kinds: key-value heads of layers, and the query heads that share one. segments: (rows, tokens up to the last row).
    """
    few, most = False, 0
    for heads, group in kinds:
        tiles = [heads * tiles_of(rows, group) for rows, _ in segments]
        few |= sum(tiles) < _TILES_A_THREAD * threads
        most = max(most, sum(count * spans_of(tokens) for count, (_, tokens) in zip(tiles, segments, strict=True)))
    return most if few else 0
