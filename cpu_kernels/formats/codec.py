"""Arrangements of small integers of sixteen rows in vectors: tables that define packing, unpacking and multiplication.

A vector lane is an output row. A k step is four consecutive values of a row, one per byte, as byte products need them.
Values of fewer than eight bits share their bytes with values of other k steps. A `Codec` lists the bit fields (pieces)
of each k step's values, which are the same for all four.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from cpu_kernels.declarations import inner, operation
from cpu_kernels.isa import POLICY
from cpu_kernels.simd import bytes as products
from cpu_kernels.simd.tiles import Tile, operands
from cpu_kernels.simd.vectors import Values, at, constant, get_i32, i32x16, load, put_i32, store, view

# The most accumulators, of two registers each, that leave enough of sixteen registers for operands.
_HELD = 6
_EACH_BYTE = 0x01010101


class Piece(NamedTuple):
    """A bit field of values: its vector, its lowest bit in each byte, its width, and its position in the value."""

    vector: int
    shift: int
    bits: int
    position: int = 0

    @property
    def mask(self) -> int:
        """The field's mask at bit 0 of a byte."""
        return (1 << self.bits) - 1


def _packed(values: Iterable[int]) -> int:
    """Up to eight bytes as a signed 64-bit integer, the first lowest: a table that compiled code can index."""
    return int.from_bytes(bytes(value % 256 for value in values).ljust(8, b"\0"), "little", signed=True)


@inner
def _byte(packed: int, index: int) -> int:
    return packed >> (8 * index) & 255


class Codec:
    """An arrangement of the values of sixteen rows in vectors.

    steps: the pieces of each k step's values: 4 or 8 steps, at most two pieces each. table: sixteen signed numbers that
    the values index, multiplied in offset binary; empty if the values are numbers themselves. largest: the largest
    value, if it is smaller than the bits allow.
    """

    def __init__(
        self, steps: Sequence[Sequence[Piece]], *, table: tuple[int, ...] = (), largest: int | None = None
    ) -> None:
        self.steps = steps
        self.table = table
        vectors, bits = 0, 0
        for pieces in steps:
            for piece in pieces:
                vectors, bits = max(vectors, piece.vector + 1), max(bits, piece.bits + piece.position)
        self.nbytes = 64 * vectors
        self.largest = largest or (1 << bits) - 1
        self.is_offset = bool(table) or self.largest == 255
        """Whether values are multiplied as offset-binary bytes, whose sums need 32 bits."""
        self.partial_steps = 8 if 8 * self.largest <= products.PARTIAL_LIMIT else 4
        """K steps whose products fit into a partial sum, 8 or 4."""

    @cached_property
    def put(self) -> Any:
        """put(to, step, values): write a step's values (bytes of an integer) to the lane at `to`, zeroed before."""
        vectors, shifts, masks, positions = self._columns(0)
        more_vectors, more_shifts, more_masks, more_positions = self._columns(1)
        two = more_masks != 0

        @inner
        def put(to: int, step: int, values: int) -> None:
            place = to + 64 * _byte(vectors, step)
            bits = values >> _byte(positions, step) & _byte(masks, step) * _EACH_BYTE
            put_i32(place, get_i32(place) | bits << _byte(shifts, step))
            if two:
                place = to + 64 * _byte(more_vectors, step)
                bits = values >> _byte(more_positions, step) & _byte(more_masks, step) * _EACH_BYTE
                put_i32(place, get_i32(place) | bits << _byte(more_shifts, step))

        return put

    @cached_property
    def value(self) -> Any:
        """value(where, i): value i of the lane at an address."""
        vectors, shifts, masks, positions = self._columns(0)
        more_vectors, more_shifts, more_masks, more_positions = self._columns(1)
        two, has_table = more_masks != 0, bool(self.table)
        low_entries, high_entries = _packed(self.table[:8]), _packed(self.table[8:])

        @inner
        def value(where: int, i: int) -> int:
            step, bit = i // 4, i % 4 * 8
            raw = get_i32(where + 64 * _byte(vectors, step)) >> (bit + _byte(shifts, step))
            found = (raw & _byte(masks, step)) << _byte(positions, step)
            if two:
                raw = get_i32(where + 64 * _byte(more_vectors, step)) >> (bit + _byte(more_shifts, step))
                found |= (raw & _byte(more_masks, step)) << _byte(more_positions, step)
            if has_table:
                found = (_byte(low_entries if found < 8 else high_entries, found % 8) ^ 128) - 128
            return found

        return value

    def _columns(self, index: int) -> tuple[int, int, int, int]:
        """Vector, shift, mask and position of piece `index` of every step, as packed bytes; mask 0 if it has none."""
        pieces = [step[index] if index < len(step) else Piece(0, 0, 0) for step in self.steps]
        columns = zip(*((piece.vector, piece.shift, piece.mask, piece.position) for piece in pieces), strict=True)
        vectors, shifts, masks, positions = map(_packed, columns)
        return vectors, shifts, masks, positions

    def emit(self, builder: ir.IRBuilder, p: ir.Value, step: int) -> ir.Value:
        """Emit code that unpacks the values of a k step to bytes, from the vectors at address p."""
        found = None
        for piece in self.steps[step]:
            value = load(builder, at(builder, p, 64 * piece.vector), i32x16.llvm, 4)
            if piece.position == 0 and piece.shift > 0 and piece.shift + piece.bits == 8 and products.is_neon():
                value = products.shift_bytes(builder, value, piece.shift)
            else:
                value = _shifted(builder, value, piece.position - piece.shift)
                if piece.bits < 8:
                    value = builder.and_(value, constant(i32x16.llvm, (piece.mask << piece.position) * _EACH_BYTE))
            found = value if found is None else builder.or_(found, value)
        if self.table:
            entries = tuple((entry + products.BYTE_OFFSET) % 256 for entry in self.table)
            found = products.look_up(builder, entries, found)
        return found

    def compute(self, p: int, step: int) -> NDArray[np.int32]:
        """The code of `emit` in Python."""
        found = np.zeros(16, np.uint32)
        for piece in self.steps[step]:
            value = view(p + 64 * piece.vector, np.uint32)
            found |= (value >> np.uint32(piece.shift) & np.uint32(piece.mask * _EACH_BYTE)) << np.uint32(piece.position)
        if self.table:
            entries = (np.array(self.table) + products.BYTE_OFFSET).astype(np.uint8)
            return entries[found.view(np.uint8)].view(np.int32)
        return found.view(np.int32)

    def dot(self, first: int, count: int, *, partial: bool = False) -> Any:
        """An intrinsic dot(acc, p, x): acc plus the products of k steps first..first+count-1.

        acc: a tile of partial sums if `partial`, else of 32-bit sums. p: address of the vectors. x: address of the
        tokens' operands for step `first`, 4 bytes per token, followed by those of the next steps. count: a multiple of
        four.
        """
        widens = POLICY.int16_accumulators and not partial and not self.is_offset
        together = min(count, products.PARTIAL_LIMIT // self.largest) if widens else count
        multiply: Any = products.multiply_offset if self.is_offset else products.multiply_small
        meaning: Any = products.added_small if partial else products.added_small_wide
        if self.is_offset:
            meaning = products.added_offset

        def compute(acc: Tile, p: int, x: int) -> Tile:
            totals = list(acc)
            for step in range(count):
                weights = self.compute(p, first + step)
                for t, s in enumerate(operands(x + 4 * step * len(totals), len(totals))):
                    totals[t] = meaning(totals[t], weights, s)
            return tuple(totals)

        @operation(compute, 0)
        def dot(builder: ir.IRBuilder, acc: Values, p: ir.Value, x: ir.Value) -> Values:
            totals, turns = acc, products.is_neon()
            for begin in range(0, count, together):
                sums = [constant(i32x16.llvm, 0)] * len(totals) if widens else totals
                steps = range(begin, min(begin + together, count))
                last = -1
                for step in sorted(steps, key=lambda step: self._vectors(first + step)) if turns else steps:
                    if turns and last >= 0 and not set(self._vectors(last)) & set(self._vectors(first + step)):
                        sums, (p, x) = products.take_turns(builder, sums, p, x)
                    sums = _add_step(builder, multiply, sums, self.emit(builder, p, first + step), x, step)
                    last = first + step
                if widens:
                    wide = [products.widen_partial(builder, each) for each in sums]
                    sums = [builder.add(total, each) for total, each in zip(totals, wide, strict=True)]
                totals = sums
            return totals

        return dot

    def _vectors(self, step: int) -> list[int]:
        """The vectors that hold a k step's values."""
        return sorted({piece.vector for piece in self.steps[step]})

    def unpacker(self) -> Any:
        """An intrinsic unpack(p, to) that stores the values of all k steps as bytes, one vector per k step."""

        def compute(p: int, to: int) -> None:
            for step in range(len(self.steps)):
                view(to + 64 * step, np.int32)[:] = self.compute(p, step)

        @operation(compute)
        def unpack(builder: ir.IRBuilder, p: ir.Value, to: ir.Value) -> None:
            for step in range(len(self.steps)):
                store(builder, at(builder, to, 64 * step), self.emit(builder, p, step), 4)

        return unpack


def _add_step(builder: ir.IRBuilder, multiply: Any, sums: Values, weights: ir.Value, x: ir.Value, place: int) -> Values:
    """Add one k step's products. place: index of the step's operands at x."""
    width = len(sums)
    operands = (products.operand(builder, x, place * width + t) for t in range(width))
    new = [multiply(builder, total, weights, each) for total, each in zip(sums, operands, strict=True)]
    if POLICY.int16_accumulators and POLICY.vector_parts > 1:
        new = products.keep_order(builder, new, _HELD)
    return new


def _shifted(builder: ir.IRBuilder, value: ir.Value, up: int) -> ir.Value:
    if up == 0:
        return value
    bits = constant(i32x16.llvm, abs(up))
    return builder.shl(value, bits) if up > 0 else builder.lshr(value, bits)


# Those of formats in several families.
NIBBLES = Codec([[Piece(step % 4, step // 4 * 4, 4)] for step in range(8)])
# Eight k steps in five vectors; half of the values need only one mask to unpack.
FIVE_BITS = Codec(
    [[Piece(step, 0, 5)] for step in range(4)] + [[Piece(step, 5, 3, 2), Piece(4, 2 * step, 2)] for step in range(4)]
)
BYTES = Codec([[Piece(step, 0, 8)] for step in range(8)])
# FP4 (E2M1) times two.
FP4 = Codec(NIBBLES.steps, table=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
