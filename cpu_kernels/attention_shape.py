"""Sizes that all parts of attention agree on."""

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
