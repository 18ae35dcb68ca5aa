"""Attention alone, for one row or many: products per second and bytes of keys and values per second, by KV types.

    attention.py [--depth 4096] [--rows 1] [--kv i16/i16,q8_0/q8_0,q4_0/q4_0] [--rounds 7]

Uses one thread and reports the best round in processor time, which other programs disturb less than wall time. The
shapes are a layer of TinyLlama 1.1B (4 key-value heads for 32) and of Qwen3 0.6B (8 for 16), repeated until the pages
of all layers exceed the caches.
"""

import argparse
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.engine_tools import table
from cpu_kernels import attention
from cpu_kernels.kernel import operation_of
from cpu_kernels.kv_types import PAGE_TOKENS, KVType, key_layout, value_layout
from cpu_kernels.memory import aligned_zeros
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
    at = numbers.ctypes.data
    kernel, (keys, values), layers = attention.attention_kernel(*types, shape.group), pages, []
    for layer in range(shape.layers):
        arguments = attention.Attention(
            queries=queries.ctypes.data,
            out=out.ctypes.data,
            query_norm=0,
            key_pages=keys[layer].ctypes.data,
            value_pages=values[layer].ctypes.data,
            kv_heads=shape.kv_heads,
            padded=shape.size,
            size=shape.size,
            rope=0,
            epsilon=at,
            group=shape.group,
            scale=at + 4,
            cap=at + 8,
            window=0,
            key_bytes=keys.strides[1],
            value_bytes=values.strides[1],
            sinks=0,
            behind=0,
            key_place_bytes=keys.strides[2],
            value_place_bytes=values.strides[2],
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
    arguments = parser.parse_args()
    rows = []
    for shape in SHAPES:
        for pair in arguments.kv.split(","):
            keys, values = map(KVType, pair.split("/"))
            products, gigabytes = measure(shape, (keys, values), arguments.depth, arguments.rows, arguments.rounds)
            rows.append((shape.name, pair, products, gigabytes))
    table(("shape", "keys/values", "10^9 products/s", "GB/s of KV"), rows)


if __name__ == "__main__":
    main()
