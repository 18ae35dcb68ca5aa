"""Helpers for kernel tests: aligned memory, blocks of random weights, records for a kernel, NumPy references."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import gguf
import numpy as np
from numpy.typing import NDArray

from cpu_kernels import activations
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.kernel import Function, Kernel
from cpu_kernels.records import Act, Form, Op, Step
from gguf_io import BLOCK_TYPES, dequantize

Floats = NDArray[np.float32]
ALL_FORMS = int(Form.BLOCKS_32 | Form.BLOCKS_256 | Form.FLOATS)
MOST_ROWS, MOST_THREADS = 72, 7
# Offsets of half-precision factors in blocks: random bytes would make them NaN or huge.
HALF_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "Q1_0": (0,),
    "Q2_0": (0,),
}


def aligned(count: int, dtype: type = np.uint8) -> NDArray:
    """Zeros, aligned to a cache line."""
    size = count * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype)


def copied(values: NDArray) -> Floats:
    """The same as floats, aligned to a cache line."""
    array = aligned(values.size, np.float32)
    array[:] = values.ravel()
    return array


def address(array: NDArray) -> int:
    return array.ctypes.data


def sizes(name: str) -> tuple[int, int]:
    """Number of values and bytes of a block."""
    return next((each.items, each.bytes) for each in BLOCK_TYPES.values() if each.name == name)


def block_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def random_weights(name: str, rows: int, k: int, seed: int = 0) -> NDArray[np.uint8]:
    """Raw rows of a block type: random bits, with factors of a realistic size, some subnormal or negative."""
    rng = np.random.default_rng(seed)
    if name in ("F32", "F16", "BF16"):
        raw = gguf.quants.quantize(rng.standard_normal((rows, k)).astype(np.float32), block_type(name))
        return np.ascontiguousarray(raw).view(np.uint8).reshape(rows, -1)
    items, size = sizes(name)
    blocks = rng.integers(0, 256, (rows * k // items, size), dtype=np.uint8)
    for offset in HALF_OFFSETS.get(name, ()):
        factors = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        factors[::7] = np.float16(3e-6)
        blocks[:, offset : offset + 2] = factors[:, None].view(np.uint8)
    if name == "IQ1_M":  # d is stored in the upper four bits of four words
        blocks[:, 55] = blocks[:, 55] & 0x8F | 0x10
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(115, 130, len(blocks))
    return blocks.reshape(rows, -1)


def extreme_weights(name: str, rows: int, k: int) -> NDArray[np.uint8]:
    """Random rows, the first four with all bits clear, all set, and the largest signed and unsigned bytes."""
    raw = random_weights(name, rows, k)
    if name in HALF_OFFSETS:
        items, size = sizes(name)
        blocks = raw.reshape(rows, k // items, size)
        factors = [offset + i for offset in HALF_OFFSETS[name] for i in (0, 1)]
        others = np.setdiff1d(np.arange(size), factors)
        for row, byte in enumerate((0x00, 0xFF, 0x80, 0x7F)):
            blocks[row, :, others] = byte
    return raw


def dequantized(name: str, raw: NDArray[np.uint8]) -> Floats:
    if name in ("Q1_0", "Q2_0"):  # gguf.quants lacks them; tests of gguf_io compare ours with ggml
        return dequantize(raw, next(each for each in BLOCK_TYPES.values() if each.name == name))
    return gguf.quants.dequantize(raw, block_type(name)).astype(np.float32, copy=False)


def record(size: int, values: dict[int, int]) -> NDArray[np.int64]:
    result = aligned(size, np.int64)
    for index, value in values.items():
        result[index] = value
    return result


def run_on_threads(kernel: Kernel | Function, op: NDArray[np.int64], step: NDArray[np.int64], threads: int) -> None:
    """Run every thread's share, one after another: the kernels have no barriers."""
    for thread in range(threads):
        kernel(address(op), address(step), thread, threads)


def operation(*arguments: int) -> NDArray[np.int64]:
    return record(Op.SIZE, {Op.ARGUMENTS + i: value for i, value in enumerate(arguments)})


class Recurrence(Protocol):
    """Computes a sequence of rows through one layer with states."""

    def append(self, start: int, stop: int, threads: int = 3) -> NDArray:
        """Compute rows start..stop-1 in one step."""

    def expected(self) -> NDArray:
        """The expected result of all rows, by NumPy."""


def check_any_pieces(layer: Callable[[list[int]], Recurrence]) -> None:
    """Check that rows of four pages are right, and bit-exact however they are divided into steps.

    layer: makes a layer whose pages have these slots.
    """
    result = layer([0, 1, 2, 3]).append(0, 64)
    np.testing.assert_allclose(result, layer([0] * 4).expected(), rtol=1e-3, atol=1e-4)
    for cuts in (range(65), (0, 1, 15, 16, 18, 33, 48, 63, 64), (0, 31, 47, 64), (0, 7, 12, 64)):
        for slots in ([0, 1, 2, 3], [0, 0, 0, 0], [2, 2, 0, 0]):  # a slot for each page, or one that is passed on
            parts = layer(slots)
            pieces = [parts.append(first, last, 1 + first % 5) for first, last in pairwise(cuts)]
            np.testing.assert_array_equal(np.concatenate(pieces), result)


class Activations:
    """Buffers for packed activations of up to MOST_ROWS rows: a shared descriptor, and a descriptor of one row per
    thread.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        rows = [MOST_ROWS, *[1] * MOST_THREADS]
        self.buffers = [[aligned(count * k * 4) for _ in range(Act.SIZE)] for count in rows]
        self.descriptors = record(len(rows) * Act.SIZE, {})
        self.descriptors[:] = [address(buffer) for one in self.buffers for buffer in one]
        self.scratch = aligned(MOST_THREADS * 65536)

    def step(self, rows: int, width: int) -> NDArray[np.int64]:
        scratch = {int(Step.SCRATCH): address(self.scratch), int(Step.SCRATCH_STRIDE): 65536}
        return record(Step.SIZE, {int(Step.ROWS): rows, int(Step.WIDTH): width, **scratch})

    def pack(self, x: Floats, width: int, threads: int, forms: int = ALL_FORMS) -> NDArray[np.int64]:
        """Pack rows without a norm; returns the step record."""
        rows, k = x.shape
        source = aligned(rows * k, np.float32)
        source[:] = x.ravel()
        epsilon = aligned(1, np.float32)
        step = self.step(rows, width)
        op = operation(address(source), k * 4, 0, k, forms, address(self.descriptors), address(epsilon), 0)
        run_on_threads(activations.norm_pack, op, step, threads)
        return step

    def values(self, field: Act, dtype: type, rows: int, width: int, per_row: int, together: int = 1) -> NDArray:
        """A buffer's entries as [row][entry], from [tile][entry / together][token][together]."""
        tiles = -(-rows // width)
        flat = self.buffers[1 if rows == 1 else 0][field].view(dtype)[: tiles * width * per_row]
        by_token = flat.reshape(tiles, per_row // together, width, together).transpose(0, 2, 1, 3)
        return by_token.reshape(tiles * width, per_row)[:rows]


@dataclass
class Matrix:
    """A packed matrix of `rows` rows of k values."""

    weight_format: WeightFormat
    packed: NDArray[np.uint8]
    rows: int
    k: int

    @classmethod
    def pack(
        cls, weight_format: WeightFormat, raw: NDArray[np.uint8], k: int, threads: int = 1, interpreted: bool = False
    ) -> "Matrix":
        """interpreted: run the source of the kernel that packs, instead of compiling it."""
        repack = weight_format.repack.make() if interpreted else weight_format.repack
        rows = len(raw)
        groups, size = rows // weight_format.group_rows, weight_format.group_bytes(k)
        packed = aligned(groups * size)
        packed[:] = 0xAA
        row_map = np.arange(rows, dtype=np.int32)
        group_rows = weight_format.group_rows
        op = operation(address(raw), raw.shape[1], address(packed), size, group_rows, k, address(row_map), groups)
        run_on_threads(repack, op, record(Step.SIZE, {}), threads)
        return cls(weight_format, packed, rows, k)

    def embed(self, tokens: list[int], factor: float = 1.0) -> Floats:
        ids = np.array(tokens, dtype=np.int32)
        x = aligned(len(tokens) * self.k, np.float32)
        factors = np.array([factor], dtype=np.float32)
        f = self.weight_format
        size = f.group_bytes(self.k)
        op = operation(address(self.packed), size, f.group_rows, self.k, address(x), self.k * 4, address(factors))
        scratch = aligned(2 * 65536)
        step = record(Step.SIZE, {int(Step.ROWS): len(tokens), int(Step.TOKENS): address(ids)})
        step[Step.SCRATCH], step[Step.SCRATCH_STRIDE] = address(scratch), 65536
        run_on_threads(f.embed, op, step, 2)
        return x.reshape(-1, self.k)

    def multiply(self, x: Floats, width: int, threads: int = 1, addend: Floats | None = None) -> Floats:
        """x @ weights.T; row by row for tiles of one token."""
        if width == 1 and len(x) > 1:
            rest = [None] * len(x) if addend is None else [row[None] for row in addend]
            return np.concatenate([self.multiply(x[i : i + 1], 1, threads, extra) for i, extra in enumerate(rest)])
        f = self.weight_format
        act = Activations(self.k)
        step = act.pack(x, width, threads, int(f.form))
        used = -(-len(x) // width) * width * self.rows
        y = aligned(used + 1024, np.float32)
        y[used:] = 7.0
        extra = aligned(MOST_ROWS * self.rows, np.float32)
        if addend is not None:
            extra[: addend.size] = addend.ravel()
        op = operation(
            address(self.packed),
            self.rows // f.group_rows,
            f.group_bytes(self.k),
            f.group_rows,
            self.k,
            address(y),
            self.rows * 4,
            0 if addend is None else address(extra),
            self.rows * 4,
            address(act.descriptors),
            1,
        )
        run_on_threads(f.matmul[width], op, step, threads)
        assert (y[used:] == 7.0).all(), "written past the last tile"
        return y[:used].reshape(-1, self.rows)[: len(x)].copy()


def quantized(x: Floats, block: int) -> tuple[NDArray[np.int8], Floats]:
    """Symmetric int8 in blocks, in float32 as Q8_0 and Q8_K are defined: values [row][k], scales [row][k / block]."""
    blocks = x.reshape(len(x), -1, block)
    scale = np.abs(blocks).max(axis=2) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    values = np.rint(blocks * inverse[:, :, None]).astype(np.int8)
    return values.reshape(x.shape), scale


def as_multiplied(x: Floats, form: Form) -> NDArray[np.float64]:
    """The activations as a format's kernels see them."""
    if form == Form.FLOATS:
        return x.astype(np.float64)
    block = 32 if form == Form.BLOCKS_32 else 256
    values, scales = quantized(x, block)
    return values.astype(np.float64) * np.repeat(scales.astype(np.float64), block, axis=1)
