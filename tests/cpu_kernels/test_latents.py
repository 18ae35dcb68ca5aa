"""Storing latents in pages, attention over them, and products with each head's own matrix, against NumPy."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_kernels import attention, latents
from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.kv_types import PAGE_TOKENS, KVType, key_layout
from cpu_kernels.pages import HeadPages, KVPages
from cpu_kernels.program import operation_of
from cpu_kernels.records import Act, Form, Step
from tests.cpu_kernels.kernel_harness import (
    Activations,
    Floats,
    address,
    aligned,
    operation,
    record,
    run_on_threads,
)

# Sums are in single precision; in q8_0 queries are rounded to 16 bits, and the numbers are stored in blocks of bytes.
TOLERANCE = {KVType.F16: 1e-5, KVType.Q8_0: 1e-3}
SCALE, EPSILON, THREADS = 0.05, 1e-5, 7


@dataclass(frozen=True)
class Shape:
    """A sequence whose last rows attend. rank: of a latent; turned: values of the rotated part."""

    heads: int
    rank: int
    turned: int
    tokens: int
    rows: int

    @property
    def plain_padded(self) -> int:
        return -(-self.rank // 32) * 32

    @property
    def turned_padded(self) -> int:
        return -(-self.turned // 32) * 32

    @property
    def padded(self) -> int:
        return self.plain_padded + self.turned_padded


SHAPES = [
    Shape(heads=4, rank=64, turned=32, tokens=300, rows=1),
    Shape(heads=4, rank=96, turned=64, tokens=530, rows=3),
    Shape(heads=5, rank=40, turned=10, tokens=33, rows=33),
    Shape(heads=16, rank=512, turned=64, tokens=600, rows=2),
    Shape(heads=20, rank=128, turned=32, tokens=270, rows=9),
]


class Case:
    """Random latents, stored by the kernel in pages out of order, and queries in the layout that layers use."""

    def __init__(self, shape: Shape, kind: KVType) -> None:
        self.shape, self.kind = shape, kind
        random = np.random.default_rng(shape.tokens)
        self.rows = aligned(shape.tokens * shape.padded, np.float32).reshape(shape.tokens, shape.padded)
        self.rows[:, : shape.rank] = random.standard_normal((shape.tokens, shape.rank))
        turned = slice(shape.plain_padded, shape.plain_padded + shape.turned_padded)
        self.rows[:, turned] = random.standard_normal((shape.tokens, shape.turned_padded))
        self.norm = aligned(shape.plain_padded, np.float32)
        self.norm[: shape.rank] = random.standard_normal(shape.rank)
        count = -(-shape.tokens // PAGE_TOKENS)
        self.layout = key_layout(kind, shape.padded)
        self.pages = aligned(count * self.layout.page_bytes).reshape(1, count, -1)
        self.table = aligned(count, np.int32)
        self.table[:] = random.permutation(count)
        half = shape.turned_padded // 2
        angles = random.uniform(0, 6, (shape.tokens, half))
        self.ropes = aligned(shape.tokens * 2 * half, np.float32).reshape(shape.tokens, 2, half)
        self.ropes[:, 0], self.ropes[:, 1] = np.cos(angles), np.sin(angles)
        self.numbers = aligned(3, np.float32)
        self.numbers[:] = (EPSILON, SCALE * np.log2(np.e), 0)
        self.width = 4 if shape.rows > 1 else 1
        self.slots_a_head = -(-shape.rows // self.width) * self.width
        self.plain = aligned(shape.heads * self.slots_a_head * shape.plain_padded, np.float32)
        self.plain = self.plain.reshape(shape.heads, self.slots_a_head, shape.plain_padded)
        self.plain[..., : shape.rank] = random.standard_normal((shape.heads, self.slots_a_head, shape.rank))
        self.queries = aligned(shape.rows * shape.heads * (32 + shape.turned_padded), np.float32)
        self.queries = self.queries.reshape(shape.rows, shape.heads, 32 + shape.turned_padded)
        self.queries[...] = random.standard_normal(self.queries.shape)
        self.scratch = aligned(THREADS * (attention.scratch_bytes(shape.padded) + 64))
        self.parts = aligned(attention.parts_bytes(100, shape.padded))

    def step(self, rows: int, **fields: int) -> NDArray[np.int64]:
        base = {
            Step.ROWS: rows,
            Step.WIDTH: self.width,
            Step.SCRATCH: address(self.scratch),
            Step.SCRATCH_STRIDE: len(self.scratch) // THREADS // 64 * 64,
            Step.ROPE_TABLES: address(self.ropes),
        }
        return record(Step.SIZE, {int(k): v for k, v in base.items()} | {int(Step[k]): v for k, v in fields.items()})

    def store(self) -> None:
        shape = self.shape
        positions = np.arange(shape.tokens, dtype=np.int32)
        tables = np.full(shape.tokens, address(self.table), np.int64)
        places = address(positions)
        step = self.step(shape.tokens, POSITIONS=places, ROPE_ROWS=places, ROW_TABLES=address(tables))
        op = operation(
            *(address(self.rows), self.rows.strides[0], address(self.norm), address(self.pages)),
            *(shape.rank, shape.padded, shape.turned_padded, 0, address(self.numbers)),
        )
        run_on_threads(latents.STORE[self.kind], op, step, 3)

    def stored(self) -> Floats:
        """The stored rows: [token][value]."""
        numbers, *scales = (plane.tokens(self.pages[None][:, :, self.table])[0, 0] for plane in self.layout.planes)
        numbers = numbers.reshape(len(numbers), -1)
        values = (numbers.view(np.int8) if scales else numbers).astype(np.float32).reshape(-1, self.shape.padded)
        factors = np.repeat(scales[0].astype(np.float32), 32, axis=-1) if scales else 1
        return (values * factors)[: self.shape.tokens]

    def turn(self, x: Floats, positions: NDArray[np.intp]) -> NDArray[np.float64]:
        """The rotated part of rows [row][...][value]."""
        half = x.shape[-1] // 2
        cos, sin = (self.ropes[positions, i].astype(np.float64) for i in range(2))
        while cos.ndim < x.ndim:
            cos, sin = cos[:, None], sin[:, None]
        low, high = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def attend(self, threads: int = 1, split: bool = False) -> Floats:
        shape = self.shape
        segments = np.array([0, shape.rows, shape.tokens - shape.rows, address(self.table)], np.int64)
        parts = address(self.parts) if split else 0
        turns = np.arange(shape.tokens - shape.rows, shape.tokens, dtype=np.int32)
        step = self.step(shape.rows, SEGMENTS=address(segments), SEGMENT_COUNT=1, PARTS=parts, ROPE_ROWS=address(turns))
        out = aligned(shape.rows * shape.heads * shape.rank, np.float32)
        numbers = address(self.numbers)
        pages = HeadPages(
            first=address(self.pages), head_bytes=self.pages.strides[0], place_bytes=self.layout.page_bytes
        )
        arguments = attention.Attention(
            queries=address(self.queries),
            out=address(out),
            pages=KVPages(keys=pages, values=pages),
            kv_heads=1,
            group=shape.heads,
            padded=shape.padded,
            size=shape.rank,
            rope=0,
            epsilon=numbers,
            scale=numbers + 4,
            cap=numbers + 8,
            longest=shape.padded,
            latents=attention.LatentQueries(
                parts=address(self.plain),
                slot_stride=self.plain.strides[1],
                head_bytes=self.queries.strides[1],
                turned_offset=4 * 32,
                turned=shape.turned_padded,
            ),
        )
        kernel = attention.attention_kernel(self.kind, None, shape.heads)
        run_on_threads(kernel, operation_of(kernel, arguments), step, threads)
        return out.reshape(shape.rows, shape.heads, shape.rank)

    def expected(self) -> NDArray[np.float64]:
        """Attention in float64 over the stored rows."""
        shape = self.shape
        keys = self.stored().astype(np.float64)
        rows = np.arange(shape.tokens - shape.rows, shape.tokens)
        plain = self.plain[:, : shape.rows].transpose(1, 0, 2).astype(np.float64)
        queries = np.concatenate([plain, self.turn(self.queries[..., 32:], rows)], axis=-1)
        scores = np.einsum("rhd,td->rht", queries, keys) * SCALE
        scores = np.where((np.arange(shape.tokens) <= rows[:, None])[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("rht,td->rhd", weights, keys[:, : shape.rank])


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_numpy_s(shape: Shape, kind: KVType) -> None:
    case = Case(shape, kind)
    case.store()
    whole = case.attend()
    np.testing.assert_allclose(whole, case.expected(), atol=TOLERANCE[kind])
    for threads in (1, 2, THREADS):
        np.testing.assert_array_equal(case.attend(threads, split=True), whole)
        np.testing.assert_array_equal(case.attend(threads), whole)
    assert not case.parts.view(np.int64)[:: attention.parts_bytes(1, shape.padded) // 8].any()  # all counters are 0


@pytest.mark.parametrize(("kind", "step"), [(KVType.F16, 2**-10), (KVType.Q8_0, 1 / 100)])
def test_pages_hold_normalised_latents_and_turned_keys(kind: KVType, step: float) -> None:
    case = Case(SHAPES[2], kind)
    case.store()
    shape = case.shape
    latent = case.rows[:, : shape.rank].astype(np.float64)
    expected = np.zeros((shape.tokens, shape.padded))
    expected[:, : shape.rank] = latent / np.sqrt((latent**2).mean(axis=1, keepdims=True) + EPSILON)
    expected[:, : shape.rank] *= case.norm[: shape.rank]
    expected[:, shape.plain_padded :] = case.turn(case.rows[:, shape.plain_padded :], np.arange(shape.tokens))
    np.testing.assert_allclose(case.stored(), expected, atol=step * np.abs(expected).max())


def test_what_is_not_seen_does_not_matter() -> None:
    """Tokens after a row, left over from a longer sequence, change nothing, however large their values."""
    case = Case(Shape(heads=4, rank=64, turned=32, tokens=40, rows=1), KVType.Q8_0)
    case.store()
    before = case.attend()
    behind = np.arange(40 % PAGE_TOKENS, PAGE_TOKENS)
    page = case.pages[None, :, int(case.table[2])]
    for plane in case.layout.planes:
        plane.put(page, behind, np.full((1, 1, len(behind), *plane.token_shape), 100, plane.dtype))
    np.testing.assert_array_equal(case.attend(), before)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 4)])
def test_each_head_is_multiplied_by_its_matrix(rows: int, width: int) -> None:
    heads, k, values = 3, 40, 32
    random = np.random.default_rng(rows)
    given = aligned(rows * heads * 64, np.float32).reshape(rows, heads, 64)
    given[..., :k] = random.standard_normal((rows, heads, k))
    matrices = random.standard_normal((heads, values, k)).astype(np.float32)
    form = WEIGHT_FORMATS["F32"]
    packed = aligned(heads * form.group_bytes(k)).reshape(heads, -1)
    # In a group of 32 rows, those of each half are interleaved value by value.
    halves = matrices.reshape(heads, 2, 16, k).transpose(0, 1, 3, 2)
    packed[...] = np.ascontiguousarray(halves).view(np.uint8).reshape(heads, -1)
    activations, joined = Activations(k), Activations(heads * values)
    segments = aligned(3 * heads + 1, np.int64)
    step = activations.step(rows, width)
    arguments = (address(given), given.strides[0], given.strides[1], k, int(Form.FLOATS))
    op = operation(*arguments, address(activations.descriptors), heads, address(segments))
    run_on_threads(latents.split_heads, op, step, 3)
    slots = heads * -(-rows // width) * width
    out = aligned(slots * values, np.float32).reshape(heads, -1, values)
    product = (address(packed), 1, packed.strides[0], form.group_rows, k, address(out), 4 * values, 0, 0)
    op = operation(*product, address(activations.descriptors), 0, address(segments), packed.strides[0])
    run_on_threads(form.matmul[width], op, step, 2)
    expected = np.einsum("hvk,rhk->rhv", matrices.astype(np.float64), given[..., :k].astype(np.float64))
    np.testing.assert_allclose(out[:, :rows].transpose(1, 0, 2), expected, atol=1e-5)
    op = operation(address(out), 4 * values, heads, values, int(Form.FLOATS), address(joined.descriptors))
    run_on_threads(latents.join_heads, op, joined.step(rows, width), 3)
    packed_rows = joined.values(Act.FLOATS, np.float32, rows, width, heads * values)
    np.testing.assert_array_equal(packed_rows, out[:, :rows].transpose(1, 0, 2).reshape(rows, -1))
