"""How much scratch memory llama.cpp reserves to compute one batch.

ggml lays all intermediate results of the graph into one buffer and reuses what is no longer needed; its size is the
peak over the attention, the feed-forward part and the logits, plus the holes of its best-fit allocator. The terms here
were fitted to what llama.cpp reports for models of many shapes (tests/gpu_offload/test_plan_against_llama.py).
"""

from dataclasses import dataclass

from gpu_offload.memory import Shape

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch may be: rows at once, rows of logits, and the cells that its rows can see.

    window_cells: cells of the sliding-window cache, 0 for models without one.
    """

    rows: int
    output_rows: int
    cells: int
    window_cells: int
    flash_attention: bool


def compute_bytes(shape: Shape, batch: Batch, *, logits: bool) -> int:
    """Return the bytes of the compute buffer on a device that runs layers, and the output layer if `logits`."""
    phases = [_attention(shape, batch), _feed_forward(shape, batch)]
    peak = mask_bytes(batch) + max(phases)
    return max(peak, _logits(shape, batch)) if logits else peak


def mask_bytes(batch: Batch) -> int:
    """Return the bytes of the attention masks, one a kind of cache: float16 for flash attention, else float32."""
    return batch.rows * (batch.cells + batch.window_cells) * (2 if batch.flash_attention else _FLOAT)


def _attention(shape: Shape, batch: Batch) -> int:
    row = batch.rows * _FLOAT
    residual = row * shape.embedding
    query = row * shape.heads * shape.key_length
    stored = row * shape.kv_heads * (shape.key_length + shape.value_length)
    if batch.flash_attention:
        return 3 * residual + query + max(query, stored)
    scores = row * shape.heads * max(batch.cells, batch.window_cells)
    return 3 * residual + 2 * query + stored + scores


def _feed_forward(shape: Shape, batch: Batch) -> int:
    row = batch.rows * _FLOAT
    residual = row * shape.embedding
    query = row * shape.heads * shape.key_length
    left_over = query + 2 * residual  # the attention's place; what is smaller than its largest hole moves in
    dense = left_over + _beyond(2 * residual, row * shape.feed_forward)
    if not shape.experts_used:
        return residual + dense
    inner = row * shape.experts_used * shape.expert_feed_forward
    outer = row * shape.experts_used * shape.embedding
    experts = left_over + _beyond(min(query, 2 * residual), inner) + (outer if outer > 2 * inner else 0)
    return residual + max(dense, experts)


def _beyond(hole: int, size: int) -> int:
    """Return the bytes of three results of one size (gate, up and their product) that find no room in a hole."""
    fitting = min(hole // size, 3) if size else 3
    return (3 - fitting) * size


def _logits(shape: Shape, batch: Batch) -> int:
    residual = _FLOAT * shape.embedding
    return batch.output_rows * (_FLOAT * shape.vocabulary + residual) + batch.rows * residual
