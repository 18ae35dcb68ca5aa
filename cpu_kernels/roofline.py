"""Probes of this machine's limits: bytes read per second, and multiply-adds per second of bytes and of floats.

The kernels run on the engine's own threads and use its own primitives, so its speed can be compared with these limits
directly. Each probe does a known amount of work; the caller measures the time.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.kernel import Function, Kernel, compile_all, kernel
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.program import operation_of
from cpu_kernels.records import argument, share
from cpu_kernels.simd.arithmetic import add_i32
from cpu_kernels.simd.tiles import (
    tile_add_scaled_in_memory,
    tile_dot4,
    tile_fma,
    tile_store,
    zero_tile_f32,
    zero_tile_i32,
)
from cpu_kernels.simd.vectors import load_f32, load_i32, store_i32, zero_i32
from cpu_kernels.threads import ThreadTeam

_BLOCK = 256
_RESULTS = 4096
_TURNS = 500_000
_VECTOR = 64
# tile_dot4 adds products of bytes up to 127 in pairs, which fit on every processor; of smaller ones some can add more.
_OPERATIONS_INT8, _OPERATIONS_FLOAT = 2 * 64, 2 * 16

Buffer = NDArray[np.generic]


class Probe:
    """Work to time: `run` handles `amount` bytes or operations (a multiply-add counts as two) on all threads."""

    def __init__(
        self, team: ThreadTeam, what: Kernel, amount: int, arguments: Arguments, keep: Sequence[Buffer]
    ) -> None:
        self.amount = amount
        self._team, self._kernel, self._keep = team, what, keep
        self._op = operation_of(what, arguments)
        compile_all([what])

    def run(self) -> None:
        """Do the work once."""
        self._team.run_kernel(self._kernel, self._op)


class Buffer256(Arguments):
    """Arguments of fill and read."""

    buffer: int  # blocks of 256 bytes
    blocks: int  # in the buffer
    results: int  # 4096 bytes per thread


_BUFFER = indices_of(Buffer256)


@kernel(Buffer256)
def fill(op: int, step: int, thread: int, threads: int) -> None:
    """Touch each thread's share of a buffer first, as packing does with weights."""
    blocks = argument(op, _BUFFER.blocks)
    p = argument(op, _BUFFER.buffer) + share(blocks, thread, threads) * _BLOCK
    for _ in range((share(blocks, thread + 1, threads) - share(blocks, thread, threads)) * _BLOCK // _VECTOR):
        store_i32(p, zero_i32())
        p += _VECTOR


@kernel(Buffer256)
def read(op: int, step: int, thread: int, threads: int) -> None:
    """Sum a buffer."""
    blocks = argument(op, _BUFFER.blocks)
    p = argument(op, _BUFFER.buffer) + share(blocks, thread, threads) * _BLOCK
    a, b, c, d = zero_i32(), zero_i32(), zero_i32(), zero_i32()
    for _ in range(share(blocks, thread, threads), share(blocks, thread + 1, threads)):
        a = add_i32(a, load_i32(p))
        b = add_i32(b, load_i32(p + 64))
        c = add_i32(c, load_i32(p + 128))
        d = add_i32(d, load_i32(p + 192))
        p += _BLOCK
    store_i32(argument(op, _BUFFER.results) + thread * _RESULTS, add_i32(add_i32(a, b), add_i32(c, d)))


class Multiply(Arguments):
    """Arguments of the kernels that time multiplications."""

    operands: int  # of the products
    iterations: int  # of the loop
    results: int  # 4096 bytes per thread


_LOOP = indices_of(Multiply)


def _int8(width: int) -> Function:
    """Products of bytes into `width` accumulators.

    One operand changes in each iteration, since a product of constants would be computed only once.
    """

    def multiply(op: int, step: int, thread: int, threads: int) -> None:
        operands = argument(op, _LOOP.operands)
        u, change = load_i32(operands), load_i32(operands + 64)
        sums = zero_tile_i32(width)
        for _ in range(argument(op, _LOOP.iterations)):
            sums = tile_dot4(sums, u, operands + 128)
            u = add_i32(u, change)
        tile_add_scaled_in_memory(
            sums, load_f32(operands), operands + 128, argument(op, _LOOP.results) + thread * _RESULTS
        )

    return multiply


def _float(width: int) -> Function:
    """Fused multiply-adds of floats into `width` accumulators."""

    def multiply(op: int, step: int, thread: int, threads: int) -> None:
        operands = argument(op, _LOOP.operands)
        vector = load_f32(operands)
        sums = zero_tile_f32(width)
        for _ in range(argument(op, _LOOP.iterations)):
            sums = tile_fma(sums, vector, operands + 128)
        tile_store(sums, argument(op, _LOOP.results) + thread * _RESULTS)

    return multiply


_INT8_KERNELS = {
    width: Kernel(f"roofline.int8_{width}", __name__, partial(_int8, width), None, Multiply) for width in (6, 12)
}
_FLOAT_KERNELS = {
    width: Kernel(f"roofline.float_{width}", __name__, partial(_float, width), None, Multiply) for width in (4, 12)
}
"""By accumulators that keep the multipliers busy: fewer if sixteen lanes take two of only sixteen registers."""


def read_probe(team: ThreadTeam, size: int) -> Probe:
    """A probe that reads a buffer of `size` bytes (rounded down to 256) once, each thread its own contiguous part."""
    blocks = size // _BLOCK
    buffer, results = aligned_zeros((blocks * _BLOCK,), np.uint8), _results(team)
    arguments = Buffer256(buffer=buffer.ctypes.data, blocks=blocks, results=results.ctypes.data)
    Probe(team, fill, buffer.size, arguments, keep=[buffer]).run()
    return Probe(team, read, buffer.size, arguments, keep=[buffer, results])


def int8_probes(team: ThreadTeam) -> list[Probe]:
    """Probes that multiply bytes with the engine's dot product, in registers only; the fastest is the limit."""
    operands = _operands(np.int32, 0x01010101)
    return [_arithmetic(team, one, operands, width * _OPERATIONS_INT8) for width, one in _INT8_KERNELS.items()]


def float_probes(team: ThreadTeam) -> list[Probe]:
    """Probes that multiply floats, in registers only; the fastest is the limit."""
    operands = _operands(np.float32, 1.0)
    return [_arithmetic(team, one, operands, width * _OPERATIONS_FLOAT) for width, one in _FLOAT_KERNELS.items()]


def _arithmetic(team: ThreadTeam, multiply: Kernel, operands: Buffer, operations: int) -> Probe:
    results = _results(team)
    arguments = Multiply(operands=operands.ctypes.data, iterations=_TURNS, results=results.ctypes.data)
    return Probe(team, multiply, _TURNS * operations * team.threads, arguments, keep=[operands, results])


def _operands(dtype: type[np.generic], value: float) -> Buffer:
    operands = aligned_zeros((64,), dtype)
    operands[:] = value
    return operands


def _results(team: ThreadTeam) -> Buffer:
    return aligned_zeros((team.threads * _RESULTS,), np.uint8)
