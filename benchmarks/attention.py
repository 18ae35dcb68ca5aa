"""Attention alone, for one row or many: products per second and bytes of keys and values per second, by KV types.

    attention.py [--depth 4096] [--rows 1] [--kv i16/i16,q8_0/q8_0,q4_0/q4_0] [--rounds 7]
    attention.py --values-from-keys

Uses one thread and reports the best round in processor time, which other programs disturb less than wall time. The
shapes are a layer of TinyLlama 1.1B (4 key-value heads for 32) and of Qwen3 0.6B (8 for 16), repeated until the pages
of all layers exceed the caches.

--values-from-keys: a full layer of Gemma 4 12B, whose values could be derived from its keys: what that takes for a
page, beside attention over it.
"""

import argparse
import time
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from benchmarks.engine_tools import table
from cpu_kernels import attention
from cpu_kernels.kernel import operation_of
from cpu_kernels.kv_types import PAGE_TOKENS, KVType, key_layout, value_layout
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.pages import HeadPages, KVPages
from cpu_kernels.records import Step


@dataclass(frozen=True)
class Shape:
    """A model's attention shape: key-value heads, query heads per key-value head, head size, and layers."""

    name: str
    kv_heads: int
    group: int
    size: int
    layers: int


SHAPES = (Shape("TinyLlama 1.1B", 4, 8, 64, 22), Shape("Qwen3 0.6B", 8, 2, 128, 28))

GEMMA_4 = Shape("Gemma 4 12B, full layers", 1, 16, 512, 8)


def derive(
    keys: NDArray[np.int16],
    scales: NDArray[np.float32],
    turns: NDArray[np.float32],
    weights: NDArray[np.float32],
    values: NDArray[np.int16],
) -> None:
    """Values of tokens from stored keys: turned back, divided by the norm's weights, rounded to 16 bits again.

    keys, values: int16[tokens, size]. scales: of tokens. turns: float32[tokens, 2, rotated pairs]. weights: inverse.
    """
    size, pairs = keys.shape[1], turns.shape[2]
    number = np.empty(size, np.float32)
    for token in range(len(keys)):
        for i in range(size):
            number[i] = keys[token, i] * scales[token] * weights[i]
        for i in range(pairs):
            first, second = number[i], number[i + size // 2]
            cosine, sine = turns[token, 0, i], turns[token, 1, i]
            number[i], number[i + size // 2] = first * cosine + second * sine, second * cosine - first * sine
        largest = np.float32(1e-30)
        for i in range(size):
            largest = max(largest, abs(number[i]))
        for i in range(size):
            values[token, i] = np.int16(np.rint(number[i] * (np.float32(32767) / largest)))


def values_from_keys(depth: int, rounds: int) -> tuple[float, float]:
    """Microseconds for a page: to derive its values from its keys, and for attention over it, by one row."""
    compiled, random = numba.njit(derive, fastmath=True), np.random.default_rng(0)
    keys = random.integers(-30_000, 30_000, (depth, GEMMA_4.size)).astype(np.int16)
    ones, values = np.ones(max(depth, GEMMA_4.size), np.float32), np.empty_like(keys)
    turns = random.random((depth, 2, GEMMA_4.size // 8), np.float32)  # a quarter of a head is rotated
    best = float("inf")
    for _ in range(rounds + 1):
        start = time.thread_time()
        compiled(keys, ones, turns, ones, values)
        best = min(best, time.thread_time() - start)
    products, _ = measure(GEMMA_4, (KVType.I16, KVType.I16), depth, 1, rounds)
    page = 2 * PAGE_TOKENS * GEMMA_4.group * GEMMA_4.size
    return best * 1e6 * PAGE_TOKENS / depth, page / products / 1e3


def measure(shape: Shape, types: tuple[KVType, KVType], depth: int, rows: int, rounds: int) -> tuple[float, float]:
    """Billions of products, and gigabytes of keys and values, per second."""
    random = np.random.default_rng(0)
    count = (depth + rows) // PAGE_TOKENS + 1
    layouts = key_layout(types[0], shape.size), value_layout(types[1], shape.size)
    pages = [aligned_zeros((shape.layers, shape.kv_heads, count, layout.page_bytes), np.uint8) for layout in layouts]
    for part in pages:
        # Any bytes will do, but as floats they should be normal numbers, or arithmetic might be slower.
        part[...] = random.integers(0x30, 0x38, part.shape, np.uint8)
    width = shape.kv_heads * shape.group * shape.size
    queries, out = (aligned_zeros((rows, width), np.float32) for _ in range(2))
    queries[...] = random.standard_normal(queries.shape)
    ropes = aligned_zeros((depth + rows, shape.size), np.float32)
    numbers = aligned_zeros((3,), np.float32)
    numbers[:2] = (1e-5, shape.size**-0.5)
    places = aligned_zeros((count,), np.int32)
    places[:] = np.arange(count)
    segment = aligned_zeros((4,), np.int64)
    segment[:] = (0, rows, depth, places.ctypes.data)
    scratch = aligned_zeros((attention.scratch_bytes(shape.size),), np.uint8)
    step = aligned_zeros((int(Step.SIZE),), np.int64)
    step[Step.SEGMENTS], step[Step.SEGMENT_COUNT] = segment.ctypes.data, 1
    step[Step.ROPE_TABLES], step[Step.SCRATCH] = ropes.ctypes.data, scratch.ctypes.data
    turns = aligned_zeros((rows,), np.int32)
    turns[:] = np.arange(depth, depth + rows)
    step[Step.ROPE_ROWS] = turns.ctypes.data
    at = numbers.ctypes.data
    kernel, (keys, values), layers = attention.attention_kernel(*types, shape.group), pages, []
    for layer in range(shape.layers):
        arguments = attention.Attention(
            queries=queries.ctypes.data,
            out=out.ctypes.data,
            pages=KVPages(
                **{
                    name: HeadPages(
                        first=array[layer].ctypes.data, head_bytes=array.strides[1], place_bytes=array.strides[2]
                    )
                    for name, array in (("keys", keys), ("values", values))
                }
            ),
            kv_heads=shape.kv_heads,
            padded=shape.size,
            size=shape.size,
            rope=0,
            epsilon=at,
            group=shape.group,
            scale=at + 4,
            cap=at + 8,
            longest=shape.size,
        )
        layers.append(operation_of(kernel, arguments))
    kernel(layers[0].ctypes.data, step.ctypes.data, 0, 1)  # compiles it
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        for op in layers:
            kernel(op.ctypes.data, step.ctypes.data, 0, 1)
        best = min(best, time.thread_time() - start)
    products = 2 * shape.layers * width * sum(range(depth + 1, depth + rows + 1))
    return products / best / 1e9, sum(part.nbytes for part in pages) / best / 1e9


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--kv", default="i16/i16,q8_0/q8_0,q4_0/q4_0")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--values-from-keys", action="store_true")
    arguments = parser.parse_args()
    if arguments.values_from_keys:
        table(
            ("µs to derive a page's values", "µs of attention"), [values_from_keys(arguments.depth, arguments.rounds)]
        )
        return
    rows = []
    for shape in SHAPES:
        for pair in arguments.kv.split(","):
            keys, values = map(KVType, pair.split("/"))
            products, gigabytes = measure(shape, (keys, values), arguments.depth, arguments.rows, arguments.rounds)
            rows.append((shape.name, pair, products, gigabytes))
    table(("shape", "keys/values", "10^9 products/s", "GB/s of KV"), rows)


if __name__ == "__main__":
    main()
