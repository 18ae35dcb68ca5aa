"""Kernels that write keys and values into pages, in each storage type."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np

from cpu_kernels import attention_i16, attention_q4_0, attention_q8_0
from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.kernel import Function, Kernel
from cpu_kernels.kv_types import OF_HEADS, PAGE_TOKENS, KVType, key_layout, value_layout
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
    key_pages: int  # address of the table of pages
    value_pages: int  # address of the table of pages
    kv_heads: int  # heads of keys and of values
    padded: int  # D: values of a head with padding
    size: int  # values of a head
    rope: int  # number of the rope table in the step record
    epsilon: int  # address of a float
    key_bytes: int  # between heads' pages of keys
    value_bytes: int  # between heads' pages of values
    key_place_bytes: int  # of keys between consecutive place numbers of a page table
    value_place_bytes: int  # of values between consecutive place numbers
    of_window: int = 0  # 1 if pages are found in the table of window layers, see records.page_table


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
                table = page_table(field(field(step, Step.ROW_TABLES), row), argument(op, _KV.of_window))
                page = get_i32(table + position // PAGE_TOKENS * 4)
                slot = position % PAGE_TOKENS
                key = argument(op, _KV.keys) + item * padded * 4
                value = argument(op, _KV.values) + item * padded * 4
                table = tables + get_i32(field(step, Step.ROPE_ROWS) + 4 * row) * padded * 4
                rotate_head(key, argument(op, _KV.norm), table, padded, argument(op, _KV.size), epsilon, _ONE, turned)
                place = (
                    argument(op, _KV.key_pages)
                    + head * argument(op, _KV.key_bytes)
                    + page * argument(op, _KV.key_place_bytes)
                )
                store_key(turned, place, slot, padded, memory)
                place = (
                    argument(op, _KV.value_pages)
                    + head * argument(op, _KV.value_bytes)
                    + page * argument(op, _KV.value_place_bytes)
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
        pages = [s.zeros(2 * 2 * each, np.uint8) for each in (key_bytes, value_bytes)]
        shape = (s.normal(32) if norm else 0, *pages, 2, 32, 24, 0, s.array([1e-5]))
        strides = (2 * key_bytes, 2 * value_bytes, key_bytes, value_bytes)
        yield s.arguments(s.normal(5, 2, 32), s.normal(5, 2, 32), *shape, *strides, int(norm))


KERNELS = {
    types: Kernel(
        "kv_store.{}_{}".format(*types), __name__, partial(_store, *types), partial(_samples, *types), StoreKV
    )
    for types in product(OF_HEADS, repeat=2)
}
"""Kernels by the types of keys and values."""
