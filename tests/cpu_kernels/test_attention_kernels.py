"""Storing keys and values in pages, and attention over them, against NumPy, for every pair of types."""

from dataclasses import dataclass, replace
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_kernels import attention, attention_i16, kv_store, words
from cpu_kernels.kv_types import OF_HEADS, PAGE_TOKENS, KVType, PageLayout, key_layout, value_layout
from cpu_kernels.pages import HeadPages, KVPages
from cpu_kernels.program import operation_of
from cpu_kernels.records import Step
from tests.cpu_kernels.kernel_harness import Floats, address, aligned, record

TYPES = [(keys, values) for keys in OF_HEADS for values in OF_HEADS]
# Error of rounding queries and softmax weights to 16 bits; a span has hundreds of weights. Storage error is not
# included: it is 6e-3 for these values in q8_0.
TOLERANCE = {(keys, values): 3e-4 if values is KVType.I16 else 1e-3 for keys, values in TYPES}
WORDS = (KVType.I16, KVType.I16)
SCALE = 0.2
THREADS = 7
LONGEST = 512  # values per head in different layers


@dataclass(frozen=True)
class Shape:
    """A sequence whose last rows attend. window, cap: 0 for none; -n for chunks. ahead: tokens seen after a row.

    fades: whether scores decrease with distance. image: whether the rows are an image's, which see each other.
    multiple: heads are padded to one of it.
    """

    heads: int
    group: int
    size: int
    tokens: int
    rows: int
    window: int = 0
    cap: float = 0.0
    ahead: int = 0
    fades: bool = False
    image: bool = False
    multiple: int = 32

    @property
    def padded(self) -> int:
        return -(-self.size // self.multiple) * self.multiple


SHAPES = [
    Shape(heads=2, group=1, size=32, tokens=300, rows=1),
    Shape(heads=1, group=1, size=128, tokens=600, rows=2),
    Shape(heads=1, group=1, size=64, tokens=270, rows=19),
    Shape(heads=2, group=3, size=64, tokens=17, rows=17),
    Shape(heads=1, group=7, size=96, tokens=530, rows=21),
    Shape(heads=1, group=20, size=64, tokens=40, rows=3),
    Shape(heads=2, group=4, size=64, tokens=700, rows=9, window=100),
    Shape(heads=1, group=8, size=64, tokens=260, rows=5, cap=3.0),
    Shape(heads=2, group=1, size=64, tokens=270, rows=270, ahead=1 << 40),
    Shape(heads=1, group=2, size=32, tokens=530, rows=530, window=21, ahead=20),
    Shape(heads=2, group=1, size=64, tokens=290, rows=290, ahead=1 << 40, fades=True),
    Shape(heads=2, group=4, size=64, tokens=300, rows=9, fades=True),
    Shape(heads=2, group=4, size=64, tokens=300, rows=40, image=True),
    Shape(heads=1, group=2, size=64, tokens=400, rows=50, window=30, image=True),
    Shape(heads=2, group=4, size=64, tokens=330, rows=40, window=-32),
    Shape(heads=1, group=2, size=64, tokens=650, rows=90, window=-300),
    Shape(heads=2, group=4, size=64, tokens=513, rows=1, window=-512),
]


class Case:
    """Random queries, keys and values; the kernel stores keys and values in pages that are out of order."""

    def __init__(self, shape: Shape, types: tuple[KVType, KVType]) -> None:
        self.shape, self.types = shape, types
        random = np.random.default_rng(shape.tokens)
        heads, padded = shape.heads, shape.padded
        self.keys, self.values = (self._padded(random, shape.tokens, heads) for _ in range(2))
        self.queries = self._padded(random, shape.rows, heads * shape.group)
        count = -(-shape.tokens // PAGE_TOKENS)
        self.layouts = key_layout(types[0], padded), value_layout(types[1], padded)
        self.pages = [aligned(heads * count * layout.page_bytes).reshape(heads, count, -1) for layout in self.layouts]
        keys, values = (
            HeadPages(first=address(pages), head_bytes=pages.strides[0], place_bytes=pages.strides[1])
            for pages in self.pages
        )
        self.kv_pages = KVPages(keys=keys, values=values)
        self.table = aligned(count, np.int32)
        self.table[:] = random.permutation(count)
        self.ropes = aligned(shape.tokens * padded, np.float32).reshape(-1, padded)
        self.ropes[:, : padded // 2] = 1
        self.numbers = aligned(3, np.float32)
        self.numbers[:] = (1e-5, SCALE if shape.cap else SCALE * np.log2(np.e), shape.cap)
        self.slopes = np.linspace(0.01, 0.5, shape.heads * shape.group, dtype=np.float32)
        self.fading = self.slopes * np.float32(np.log2(np.e)), np.arange(16, dtype=np.float32)
        self.scratch = aligned(THREADS * (attention.scratch_bytes(LONGEST) + 64))
        self.parts = aligned(attention.parts_bytes(100, LONGEST))

    def _padded(self, random: np.random.Generator, rows: int, heads: int) -> Floats:
        data = aligned(rows * heads * self.shape.padded, np.float32).reshape(rows, heads, self.shape.padded)
        data[..., : self.shape.size] = random.standard_normal((rows, heads, self.shape.size))
        return data

    def step(self, **fields: int) -> NDArray[np.int64]:
        base = {
            Step.SCRATCH: address(self.scratch),
            Step.SCRATCH_STRIDE: len(self.scratch) // THREADS // 64 * 64,
            Step.ROPE_TABLES: address(self.ropes),
        }
        return record(Step.SIZE, {int(k): v for k, v in base.items()} | {int(Step[k]): v for k, v in fields.items()})

    def store(self, threads: int = 1) -> None:
        shape = self.shape
        positions = np.arange(shape.tokens, dtype=np.int32)
        tables = np.full(shape.tokens, address(self.table), np.int64)
        places = address(positions)
        step = self.step(ROWS=shape.tokens, POSITIONS=places, ROPE_ROWS=places, ROW_TABLES=address(tables))
        arguments = kv_store.StoreKV(
            keys=address(self.keys),
            values=address(self.values),
            norm=0,
            pages=self.kv_pages,
            kv_heads=shape.heads,
            padded=shape.padded,
            size=shape.size,
            rope=0,
            epsilon=address(self.numbers),
        )
        kernel = kv_store.KERNELS[self.types]
        op = operation_of(kernel, arguments)
        for thread in range(threads):
            kernel(address(op), address(step), thread, threads)

    def stored(self) -> list[Floats]:
        """The stored keys and values: [token][head][value]; Hadamard-transformed in q4_0."""
        count = len(self.table) * PAGE_TOKENS
        shape = (self.shape.heads, count, self.shape.padded)
        result = []
        for kind, pages, layout in zip(self.types, self.pages, self.layouts, strict=True):
            ordered = pages[None][:, :, self.table]
            numbers, *scales = (plane.tokens(ordered)[0].reshape(shape[0], count, -1) for plane in layout.planes)
            if kind is KVType.Q4_0:
                numbers = np.array(gguf.quants.IQ4_NL.kvalues)[nibbles(numbers)]
            else:
                numbers = numbers.view(np.int8 if kind is KVType.Q8_0 else np.int16)
            factor = np.repeat(scales[0].astype(np.float32), 1 if kind is KVType.I16 else 32, axis=-1)
            floats = numbers.astype(np.float32).reshape(shape) * factor
            result.append(floats[:, : self.shape.tokens].transpose(1, 0, 2))
        return result

    def attend(self, threads: int = 1, split: bool = False) -> Floats:
        shape = self.shape
        position = shape.tokens - shape.rows
        segments = np.array([0, shape.rows, position, address(self.table)], np.int64)
        parts = address(self.parts) if split else 0
        turns = np.arange(position, shape.tokens, dtype=np.int32)
        of_image = {"IMAGE_ROWS": 1, "LOOK_AHEAD": shape.rows} if shape.image else {}
        step = self.step(SEGMENTS=address(segments), SEGMENT_COUNT=1, PARTS=parts, ROPE_ROWS=address(turns), **of_image)
        out = aligned(shape.rows * shape.heads * shape.group * shape.size, np.float32)
        epsilon = address(self.numbers)
        slopes, numbers = map(address, self.fading)
        arguments = attention.Attention(
            queries=address(self.queries),
            out=address(out),
            pages=self.kv_pages,
            kv_heads=shape.heads,
            group=shape.group,
            padded=shape.padded,
            size=shape.size,
            rope=0,
            epsilon=epsilon,
            scale=epsilon + 4,
            cap=epsilon + 8,
            mask=attention.Mask(window=shape.window, behind=shape.ahead, images=int(shape.image)),
            longest=LONGEST,
            alibi=attention.Alibi(slopes=slopes, numbers=numbers) if shape.fades else attention.Alibi(),
        )
        kernel = attention.attention_kernel(*self.types, shape.group)
        op = operation_of(kernel, arguments)
        for thread in range(threads):
            kernel(address(op), address(step), thread, threads)
        return out.reshape(shape.rows, shape.heads * shape.group, shape.size)

    def expected(self, given: tuple[Floats, Floats] | None = None) -> NDArray[np.float64]:
        """Attention in float64 over the stored keys and values, or over given ones."""
        shape = self.shape
        plain = [
            turned(part) if kind is KVType.Q4_0 and given is None else part.astype(np.float64)
            for kind, part in zip(self.types, given or self.stored(), strict=True)
        ]
        queries = self.queries.astype(np.float64) * self.numbers[1]
        keys, values = (np.repeat(part, shape.group, axis=1) for part in plain)
        scores = np.einsum("rhd,thd->rht", queries, keys) * (SCALE / self.numbers[1])
        if shape.cap:
            scores = shape.cap * np.tanh(scores / shape.cap)
        rows = np.arange(shape.tokens - shape.rows, shape.tokens)[:, None]
        tokens = np.arange(shape.tokens)
        if shape.fades:
            scores -= self.slopes[:, None] * np.abs(rows[..., None] - tokens)
        ahead = shape.rows if shape.image else shape.ahead
        window = shape.window or int(rows[-1, 0]) + 1
        seen = (tokens <= rows + ahead) & (
            tokens > rows - window if window > 0 else tokens // -window == rows // -window
        )
        scores = np.where(seen[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("rht,thd->rhd", weights, values)[..., : shape.size]


def check_levels(given: NDArray[np.float64], stored: NDArray[np.float64]) -> None:
    """Compare the stored numbers with the nearest levels at each of many scales, and with the error of Q4_0 blocks."""
    levels = np.array(gguf.quants.IQ4_NL.kvalues, np.float64)
    blocks = given.reshape(-1, 32)
    lost = ((stored.reshape(-1, 32) - blocks) ** 2).sum(axis=1)
    scales = (
        np.abs(blocks).max(axis=1)[:, None, None] / np.concatenate([np.arange(-140, -95), np.arange(95, 140)])[:, None]
    )
    scaled = np.divide(blocks[:, None], scales, out=np.zeros((*scales.shape[:2], 32)), where=scales != 0)
    nearest = levels[np.abs(scaled[..., None] - levels).argmin(axis=-1)] * scales
    best = ((nearest - blocks[:, None]) ** 2).sum(axis=2).min(axis=1)
    assert (lost >= best * 0.97).all()  # the scale is between those tried
    assert lost.mean() < 1.1 * best.mean()
    along = (stored.reshape(-1, 32) * blocks).sum(axis=1) - (blocks**2).sum(axis=1)
    assert (np.abs(along) <= 1e-3 * (blocks**2).sum(axis=1)).all()  # scales are rounded to half precision
    plain = gguf.quants.quantize(blocks.astype(np.float32), gguf.GGMLQuantizationType.Q4_0)
    error = gguf.quants.dequantize(plain, gguf.GGMLQuantizationType.Q4_0) - blocks
    assert lost.sum() < 0.8 * (error**2).sum()


def nibbles(numbers: NDArray[Any]) -> NDArray[Any]:
    """The q4_0 codes in the order of a head, [head][token][value]: from words of keys or bytes of values."""
    if numbers.dtype == np.uint32:
        shifts = np.array([16 * (i % 2) + i // 2 * 4 for i in range(8)], np.uint32)
        return (numbers[..., None] >> shifts & 15).reshape(*numbers.shape[:2], -1)
    bytes_of_blocks = numbers.reshape(*numbers.shape[:2], -1, 16)
    return np.concatenate([bytes_of_blocks & 15, bytes_of_blocks >> 4], axis=-1).reshape(*numbers.shape[:2], -1)


def turned(numbers: NDArray[Any]) -> NDArray[np.float64]:
    """Multiply by the orthogonal Hadamard matrix of the largest power of two that divides the last axis,
    part by part.
    """
    size = numbers.shape[-1] & -numbers.shape[-1]
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron([[1.0, 1.0], [1.0, -1.0]], matrix)
    parts = numbers.astype(np.float64).reshape(*numbers.shape[:-1], -1, size)
    return np.asarray(parts @ matrix / np.sqrt(size)).reshape(numbers.shape)


# Mixed types are tested with the widest tiles only, whose kernels take a third of the time to compile.
WIDE = [shape if shape.group > 4 else replace(shape, heads=1, group=8) for shape in SHAPES if shape.group >= 4]
CASES = [(shape, types) for shape in SHAPES for types in TYPES if types[0] is types[1]]
CASES += [(shape, types) for shape in WIDE for types in TYPES if types[0] is not types[1]]
CASES += [(Shape(2, 1, size, 290, 290, ahead=1 << 40, multiple=16), WORDS) for size in (8, 40, 72)]


@pytest.mark.parametrize(("shape", "types"), CASES, ids=str)
def test_attention_is_numpy_s(shape: Shape, types: tuple[KVType, KVType]) -> None:
    case = Case(shape, types)
    case.store()
    whole = case.attend()
    np.testing.assert_allclose(whole, case.expected(), atol=TOLERANCE[types])
    for threads in (1, 2, THREADS):
        np.testing.assert_array_equal(case.attend(threads, split=True), whole)
        np.testing.assert_array_equal(case.attend(threads), whole)
    assert not case.parts.view(np.int64)[:: attention.parts_bytes(1, LONGEST) // 8].any()  # all counters are 0


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_pages_hold_what_the_types_say(types: tuple[KVType, KVType]) -> None:
    case = Case(Shape(heads=2, group=1, size=64, tokens=37, rows=1), types)
    case.keys[3] = 0
    case.store(threads=3)
    for kind, given, stored in zip(types, (case.keys, case.values), case.stored(), strict=True):
        if kind is KVType.I16:
            most = np.abs(given).max(axis=-1, keepdims=True)
            norm = np.linalg.norm(given, axis=-1, keepdims=True)
            unit = np.maximum(norm / 46300, most / 32767) if given is case.keys else most / 8191
            assert (np.abs(stored - given) <= 0.501 * unit).all()
            continue
        if kind is KVType.Q4_0:
            check_levels(turned(given), stored.astype(np.float64))
            continue
        blocks = gguf.quants.quantize(given.reshape(-1, 64), gguf.GGMLQuantizationType.Q8_0)
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0).reshape(given.shape)
        np.testing.assert_array_equal(stored, expected)


@pytest.mark.parametrize("kind", OF_HEADS)
def test_what_is_not_seen_does_not_matter(kind: KVType) -> None:
    """Tokens after a row, left over from a longer sequence, change nothing, however large their values."""
    case = Case(Shape(heads=1, group=4, size=64, tokens=40, rows=1), (kind, kind))
    case.store()
    before = case.attend()
    layout: PageLayout = case.layouts[1]
    behind = np.arange(40 % PAGE_TOKENS, PAGE_TOKENS)
    page = case.pages[1][None, :, int(case.table[2])]
    for plane in layout.planes:
        filler = np.full((1, 1, len(behind), *plane.token_shape), 100, plane.dtype)
        plane.put(page, behind, filler)
    np.testing.assert_array_equal(case.attend(), before)


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("rows", [1, 40])
def test_words_lose_no_more_than_halves_whatever_a_head_s_size(size: int, rows: int) -> None:
    """Compare with float64 on the given values, beside keys and values that are only rounded to half precision."""
    case = Case(Shape(heads=1, group=2, size=size, tokens=300, rows=rows, window=200), WORDS)
    check_against_halves(case, 1)


@pytest.mark.parametrize(
    ("outliers", "times"),
    [
        ("a key's channel", 0.6),
        ("its query avoids it", 3),
        ("a query's channel", 1.4),
        ("values", 0.7),
        ("a token", 0.6),
    ],
)
def test_words_hold_beside_outliers(outliers: str, times: float) -> None:
    """Like the keys of Qwen 2.5, whose biases are a hundred times as large as the rest.

    Only if queries are near zero in that channel do words lose more than half precision; bytes lose 480 times as much.
    """
    case = Case(Shape(heads=1, group=4, size=64, tokens=530, rows=20), WORDS)
    if outliers == "a key's channel":
        case.keys[..., 5] += 100
    elif outliers == "its query avoids it":
        case.keys[..., 5] += 100
        case.queries[..., 5] *= 0.1
    elif outliers == "a query's channel":
        case.queries[..., 7] += 30
        case.keys[..., 7] *= 0.1
    elif outliers == "values":
        case.values[..., 3] *= 5
    else:
        case.values[0] *= 30
    check_against_halves(case, times)


def check_against_halves(case: Case, times: float) -> None:
    case.store()
    exact = case.expected((case.keys, case.values))
    halves = case.expected((case.keys.astype(np.float16), case.values.astype(np.float16))) - exact
    words = case.attend() - exact
    assert 0 < np.sqrt((words**2).mean()) < times * np.sqrt((halves**2).mean())


@pytest.mark.parametrize("size", [32, 64, 128, 512])
@pytest.mark.parametrize("spread", [1, 0], ids=["even", "one channel"])
def test_no_sum_of_words_overflows(size: int, spread: int) -> None:
    """Queries parallel and antiparallel to keys, as long as possible; and all values the largest, with
    equal weights.
    """
    case = Case(Shape(heads=1, group=4, size=size, tokens=520, rows=10), WORDS)
    direction = np.ones(size, np.float32) if spread else np.eye(1, size, dtype=np.float32)[0]
    direction /= np.linalg.norm(direction)
    signs = np.where(np.arange(520) % 3 == 0, -1, 1)
    case.keys[:, 0, :size] = signs[:, None] * direction * 1e4
    case.queries[..., :size] = direction * 1e-4
    case.values[..., :size] = 7 + np.arange(520)[:, None, None] % 2
    case.store()
    exact = case.expected((case.keys, case.values))
    np.testing.assert_allclose(case.attend(), exact, rtol=2e-4)
    case.queries[...] = 0
    exact = case.expected((case.keys, case.values))
    np.testing.assert_allclose(case.attend(), exact, rtol=2e-4)


def test_the_bounds_of_words_hold() -> None:
    """Rounding moves a number by at most a half, so norms by half the root of their size, and totals by half a part."""
    assert (float(words.NORM) + np.sqrt(LONGEST) / 2) ** 2 < 2**31
    tokens = attention_i16.PART_PAGES * PAGE_TOKENS
    assert (float(attention_i16.TOTAL) + tokens / 2) * float(attention_i16.LARGEST) < 2**31
