"""Kernels that write keys and values into pages, in each storage type."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np

from cpu_kernels import attention_i16, attention_q4_0, attention_q8_0
from cpu_kernels.arguments import Arguments, indices_of, integers_of
from cpu_kernels.kernel import Function, Kernel
from cpu_kernels.kv_types import OF_HEADS, PAGE_TOKENS, KVType, key_layout, value_layout
from cpu_kernels.pages import HeadPages, KVPages
from cpu_kernels.records import Step, argument, field, page_table, scratch, stage_rows
from cpu_kernels.rope import rotate_head
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.vectors import get_f32, get_i32

_ONE = np.float32(1.0)
_TYPES = {KVType.I16: attention_i16, KVType.Q8_0: attention_q8_0, KVType.Q4_0: attention_q4_0}


class StoreKV(Arguments):
    """Arguments of the kernels that store keys and values."""

    keys: int  # rows of kv_heads * D
    values: int  # rows of kv_heads * D
    norm: int  # weight of the norm of keys, or 0
    pages: KVPages
    kv_heads: int  # heads of keys and of values
    padded: int  # D: values of a head with padding
    size: int  # values of a head
    rope: int  # number of the rope table in the step record
    epsilon: int  # address of a float


_KV = indices_of(StoreKV)


def _store(keys: KVType, values: KVType) -> Function:
    """Function that normalises and rotates keys, and writes keys and values of all rows into their pages.

    Threads divide the heads of all rows.
    """
    store_key, store_value = _TYPES[keys].store_key, _TYPES[values].store_value

    def store_kv(op: int, step: int, thread: int, threads: int) -> None:
        heads, padded = argument(op, _KV.kv_heads), argument(op, _KV.padded)
        turned = scratch(step, thread)
        memory = turned + padded * 4
        tables = field(step, Step.ROPE_TABLES + argument(op, _KV.rope))
        epsilon = get_f32(argument(op, _KV.epsilon))
        items = stage_rows(op, step) * heads
        first, last = first_share(op, step, items, thread, threads)
        while first >= 0:
            for item in range(first, last):
                row, head = item // heads, item % heads
                position = get_i32(field(step, Step.POSITIONS) + 4 * row)
                table = page_table(field(field(step, Step.ROW_TABLES), row), argument(op, _KV.pages.of_window))
                page = get_i32(table + position // PAGE_TOKENS * 4)
                slot = position % PAGE_TOKENS
                key = argument(op, _KV.keys) + item * padded * 4
                value = argument(op, _KV.values) + item * padded * 4
                table = tables + get_i32(field(step, Step.ROPE_ROWS) + 4 * row) * padded * 4
                rotate_head(key, argument(op, _KV.norm), table, padded, argument(op, _KV.size), epsilon, _ONE, turned)
                place = (
                    argument(op, _KV.pages.keys.first)
                    + head * argument(op, _KV.pages.keys.head_bytes)
                    + page * argument(op, _KV.pages.keys.place_bytes)
                )
                store_key(turned, place, slot, padded, memory)
                place = (
                    argument(op, _KV.pages.values.first)
                    + head * argument(op, _KV.pages.values.head_bytes)
                    + page * argument(op, _KV.pages.values.place_bytes)
                )
                store_value(value, place, slot, padded, memory)
            first, last = next_share(op, step, items, thread, threads)

    return store_kv


def _samples(keys: KVType, values: KVType) -> Iterator[Sample]:
    key_bytes, value_bytes = key_layout(keys, 32).page_bytes, value_layout(values, 32).page_bytes
    for norm in (False, True):
        s = Sample(rows=5)
        s.positions(14, 32)
        s.step({Step.ROW_TABLES: s.array([s.tables([1, 0], [0, 1])] * 5, np.int64)})
        key_pages, value_pages = (
            HeadPages(first=s.zeros(2 * 2 * each, np.uint8), head_bytes=2 * each, place_bytes=each)
            for each in (key_bytes, value_bytes)
        )
        stored = StoreKV(
            keys=s.normal(5, 2, 32),
            values=s.normal(5, 2, 32),
            norm=s.normal(32) if norm else 0,
            pages=KVPages(keys=key_pages, values=value_pages, of_window=int(norm)),
            kv_heads=2,
            padded=32,
            size=24,
            rope=0,
            epsilon=s.array([1e-5]),
        )
        yield s.arguments(*integers_of(stored))


KERNELS = {
    types: Kernel(
        "kv_store.{}_{}".format(*types), __name__, partial(_store, *types), partial(_samples, *types), StoreKV
    )
    for types in product(OF_HEADS, repeat=2)
}
"""Kernels by the types of keys and values."""
