"""Sizes that all parts of attention share, and how a step is divided into tiles and spans."""

from collections.abc import Iterable, Sequence

from cpu_kernels.declarations import inner
from cpu_kernels.isa import POLICY
from cpu_kernels.kv_types import PAGE_TOKENS

MAX_COLUMNS = 16
"""The most columns that share a pass over a key-value head; a column is one query head of one row."""

SPAN_PAGES = 16
SPAN_TOKENS = SPAN_PAGES * PAGE_TOKENS
SPAN_BYTES = SPAN_TOKENS * 4
"""A span: the tokens of one softmax before it is merged with others. Spans are counted from position 0."""

# Accumulator vectors in a register tile. On AVX2 a vector takes two of the sixteen registers, so four accumulators
# leave room for operands; fewer would stall on the latency of additions.
VECTORS = POLICY.attention_vectors
WIDTHS = tuple(width for width in (1, 2, 4, 8) if width <= VECTORS)
"""Column counts of a register tile; its rows are pages of keys, or vectors of values."""


def rows_of(columns: int) -> int:
    """Rows of a register tile with `columns` columns. A single row would use each loaded column value only once."""
    return max(VECTORS // columns, 2) if POLICY.vector_parts == 1 else VECTORS // columns


HEADER_BYTES = 64 + 8 * MAX_COLUMNS
"""Before the outputs of a span: a counter, and the maxima and sums of all columns."""
MAXIMA, SUMS = 64, 64 + 4 * MAX_COLUMNS

# With fewer tiles of attention per thread than this, threads would wait for the one with the longest tiles.
_TILES_A_THREAD = 8


@inner
def parts_bytes(spans: int, padded: int) -> int:
    """Bytes for the results of `spans` spans: header, and outputs of MAX_COLUMNS columns with D values each."""
    return spans * (HEADER_BYTES + MAX_COLUMNS * padded * 4)


def tiles_of(rows: int, group: int) -> int:
    """Tiles of a segment for one key-value head."""
    together = max(1, MAX_COLUMNS // group)
    return -(-rows // together) * -(-group // MAX_COLUMNS)


def spans_of(tokens: int) -> int:
    """Spans that cover `tokens` tokens: the most that a tile is split into."""
    return -(-tokens // SPAN_TOKENS)


def shared_spans(kinds: Iterable[tuple[int, int]], segments: Sequence[tuple[int, int]], threads: int) -> int:
    """The most spans of any layer in a step that threads divide by spans; 0 if they divide the step by tiles.

    kinds: per layer (key-value heads, query heads per key-value head). segments: (rows, tokens up to the last row).
    """
    few, most = False, 0
    for heads, group in kinds:
        tiles = [heads * tiles_of(rows, group) for rows, _ in segments]
        few |= sum(tiles) < _TILES_A_THREAD * threads
        most = max(most, sum(count * spans_of(tokens) for count, (_, tokens) in zip(tiles, segments, strict=True)))
    return most if few else 0
