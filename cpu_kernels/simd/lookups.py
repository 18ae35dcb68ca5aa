"""Lookups in tables of more than sixteen entries, and bit fields, to unpack grids and base-3 digits.

Operands are sixteen lanes of four bytes. AVX512-VBMI selects 64 bytes at once from two registers (vpermi2b), and eight
neighboring bits for each byte (vpmultishiftqb). With it, tables are stored as planes of bytes. Without it, each lane's
entry is loaded separately, which takes about ten times as many instructions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from cpu_kernels.declarations import Intrinsic, TupleOf, define, operation
from cpu_kernels.isa import emits
from cpu_kernels.simd.vectors import I8, I32, I64, Lanes, Values, call, constant, i32x16

_BYTES = ir.VectorType(I8, 64)
_REGISTER = 64
_DIGITS, _POWERS = 5, np.array([1, 3, 9, 27, 81])


def _permutes_bytes() -> bool:
    return emits("avx512vbmi")


def _and(builder: ir.IRBuilder, x: ir.Value, mask: int) -> ir.Value:
    return builder.and_(x, constant(i32x16.llvm, mask))


def _right(builder: ir.IRBuilder, x: ir.Value, bits: int) -> ir.Value:
    return builder.lshr(x, constant(i32x16.llvm, bits)) if bits else x


def _left(builder: ir.IRBuilder, x: ir.Value, bits: int) -> ir.Value:
    return builder.shl(x, constant(i32x16.llvm, bits)) if bits else x


def _constant_table(builder: ir.IRBuilder, name: str, element: ir.Type, entries: NDArray[Any]) -> ir.Value:
    """A constant array of the module, aligned to a register."""
    table = builder.module.globals.get(name)
    if table is None:
        type_ = ir.ArrayType(element, len(entries))
        table = ir.GlobalVariable(builder.module, type_, name)
        table.linkage, table.global_constant, table.align = "internal", True, _REGISTER
        table.initializer = ir.Constant(type_, entries.tolist())
    return table


def _shifted_bytes(builder: ir.IRBuilder, x: ir.Value, offsets: list[int]) -> ir.Value:
    """Byte j of each lane: the lane's eight bits from bit offsets[j] on. An offset may be as low as -8.

    Bits beyond the lane come from another one, so the caller must mask them.
    """
    control = ir.Constant(_BYTES, [(32 * (lane % 2) + offset) % 64 for lane in range(16) for offset in offsets])
    shifted = call(builder, "llvm.x86.avx512.pmultishift.qb.512", _BYTES, control, builder.bitcast(x, _BYTES))
    return builder.bitcast(shifted, i32x16.llvm)


def _permuted(builder: ir.IRBuilder, name: str, entries: NDArray[np.uint8], low: ir.Value, high: ir.Value) -> ir.Value:
    """For each byte a table entry: the lower eight bits of its index are in `low`, the others in `high`."""
    pointer = builder.bitcast(_constant_table(builder, name, I8, entries), _BYTES.as_pointer())
    count = len(entries) // _REGISTER
    parts = [builder.load(builder.gep(pointer, [I64(i)]), align=_REGISTER, typ=_BYTES) for i in range(count)]
    low, high = builder.bitcast(low, _BYTES), builder.bitcast(high, _BYTES)
    permute = "llvm.x86.avx512.vpermi2var.qi.512"
    found = [call(builder, permute, _BYTES, a, low, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    zero, bit = constant(_BYTES, 0), 1
    chosen = builder.icmp_signed("<", low, zero)
    while len(found) > 1:
        found = [builder.select(chosen, b, a) for a, b in zip(found[::2], found[1::2], strict=True)]
        chosen = builder.icmp_unsigned("!=", builder.and_(high, constant(_BYTES, bit)), zero)
        bit *= 2
    return found[0]


def _points_from_planes(
    builder: ir.IRBuilder, name: str, entries: NDArray[np.uint32], low: ir.Value, high: ir.Value
) -> Values:
    """Look up entries in two planes, each of which packs two bytes of every entry into one.

    That needs entries whose nibbles are below 4, or whose upper nibbles are 0. Raises ValueError for others.
    """
    shift, mask = (4, 0x0F0F0F0F) if not (entries & 0xF0F0F0F0).any() else (2, 0x33333333)
    if (entries & ~np.uint32(mask)).any():
        raise ValueError(f"the points of {name} do not fit into two planes")
    halves = [
        _permuted(builder, f"{name}.{i}", (part & 255 | part >> 8 << shift).astype(np.uint8), low, high)
        for i, part in enumerate((entries & 0xFFFF, entries >> 16))
    ]
    words = []
    for pair in range(2):
        order = [place for lane in range(16) for b in (0, 1) for place in (4 * lane + 2 * pair + b,) * 2]
        order = [place + 64 * (i % 2) for i, place in enumerate(order)]
        both = builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, 64), order))
        for b in range(2):
            offsets = [16 * b + 8 * (j // 2) + shift * (j % 2) for j in range(4)]
            words.append(_and(builder, _shifted_bytes(builder, both, offsets), mask))
    return words


def _gathered(builder: ir.IRBuilder, table: ir.Value, indices: ir.Value) -> ir.Value:
    """Load an entry for each lane in turn; gather instructions are no faster."""
    found = ir.Constant(i32x16.llvm, ir.Undefined)
    for lane in range(16):
        index = builder.zext(builder.extract_element(indices, I32(lane)), I64)
        entry = builder.load(builder.gep(table, [I32(0), index], inbounds=True))
        found = builder.insert_element(found, entry, I32(lane))
    return found


def points_table(name: str, entries: Callable[[], NDArray[np.uint32]]) -> Any:
    """An intrinsic found(low, high): four vectors of entries of a table, vector b for byte b of the lanes.

    An entry's index is 256 times high's byte plus low's, and must be below the table's length; high is not read if the
    length is 256. entries(): the table's words, 256 or a greater power of two. All nibbles are below 4, or the upper
    nibbles of all bytes are 0. It is called when a kernel is compiled or interpreted.
    """

    def emit(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> Values:
        if _permutes_bytes():
            return _points_from_planes(builder, name, entries(), low, high)
        table, found = _constant_table(builder, name, I32, entries().view(np.int32)), []
        for b in range(4):
            index = _and(builder, _right(builder, low, 8 * b), 255)
            if len(entries()) > 256:
                index = builder.or_(index, _left(builder, _and(builder, _right(builder, high, 8 * b), 255), 8))
            found.append(_gathered(builder, table, index))
        return found

    def meaning(low: Lanes, high: Lanes) -> tuple[Lanes, ...]:
        numbers = low.view(np.uint8).astype(np.int64)
        if len(entries()) > 256:
            numbers += 256 * high.view(np.uint8).astype(np.int64)
        return tuple(entries()[numbers.reshape(16, 4)[:, b]].view(np.int32) for b in range(4))

    return Intrinsic(name, emit, meaning, 2, [i32x16, i32x16], lambda _low, _high: TupleOf(i32x16, 4))


def _meaning_of_spread(x: Lanes, width: int) -> Lanes:
    fields = x.view(np.uint32)[:, None] >> np.arange(0, 4 * width, width, dtype=np.uint32) & np.uint32(2**width - 1)
    return np.ascontiguousarray(fields.astype(np.uint8)).view(np.int32).ravel()


@operation(_meaning_of_spread, 0, literals=[1])
def spread(builder: ir.IRBuilder, x: ir.Value, width: int) -> ir.Value:
    """The four lowest fields of `width` bits (a literal, at most 8) of each lane, one per byte."""
    field = 2**width - 1
    if _permutes_bytes():
        return _and(builder, _shifted_bytes(builder, x, [width * b for b in range(4)]), field * 0x01010101)
    bytes_ = [_and(builder, _left(builder, x, (8 - width) * b), field << 8 * b) for b in range(4)]
    return builder.or_(builder.or_(bytes_[0], bytes_[1]), builder.or_(bytes_[2], bytes_[3]))


_EVENED = np.array([i | i.bit_count() % 2 << 7 for i in range(128)], np.uint8)


def _emit_evened(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    if _permutes_bytes():
        found = _permuted(builder, "localllm.even_signs", _EVENED, x, x)
        return builder.bitcast(found, i32x16.llvm)
    ones = builder.xor(x, _right(builder, _and(builder, x, 0x70707070), 4))
    ones = builder.xor(ones, _right(builder, _and(builder, ones, 0x0C0C0C0C), 2))
    ones = builder.xor(ones, _right(builder, _and(builder, ones, 0x02020202), 1))
    return builder.or_(x, _left(builder, _and(builder, ones, 0x01010101), 7))


# Bytes below 128 with an eighth bit added for even parity.
with_even_bits = define(
    "with_even_bits", [i32x16], i32x16, _emit_evened, lambda x: _EVENED[x.view(np.uint8) & 127].view(np.int32)
)


def _emit_signs(builder: ir.IRBuilder, x: ir.Value) -> Values:
    if _permutes_bytes():
        offsets = ([8 * b + j - 3 for j in range(4)] for b in range(4))
        return [_and(builder, _shifted_bytes(builder, x, each), 0x88888888 - 2**32) for each in offsets]
    words = []
    for b in range(4):
        bits = _right(builder, x, 8 * b)
        # The product holds four copies of the lowest seven bits, shifted by 0, 7, 14 and 21.
        apart = builder.mul(_and(builder, bits, 127), constant(i32x16.llvm, 1 | 1 << 7 | 1 << 14 | 1 << 21))
        eighth = _and(builder, _left(builder, bits, 21), 1 << 28)
        words.append(_left(builder, builder.or_(_and(builder, apart, 0x11111111), eighth), 3))
    return words


def _meaning_of_signs(x: Lanes) -> tuple[Lanes, ...]:
    bits = np.unpackbits(x.view(np.uint8).reshape(16, 4), axis=1, bitorder="little").reshape(16, 4, 2, 4)
    words = (bits[:, :, 0] << 3 | bits[:, :, 1] << 7).astype(np.uint8)
    return tuple(np.ascontiguousarray(words[:, b]).view(np.int32).ravel() for b in range(4))


sign_words = Intrinsic("sign_words", _emit_signs, _meaning_of_signs, 1, [i32x16], lambda _x: TupleOf(i32x16, 4))
"""Four vectors of signs, vector b for byte b of the lanes: bit j is bit 3 of byte j, bit 4 + j is bit 7 of byte j."""


def _digits_of_bytes(values: Any) -> Any:
    """Base-3 digits, highest first, of bytes that encode them as fractions of 256: [...][digit]."""
    return np.asarray(values, np.int64)[..., None] * _POWERS % 256 * 3 // 256


def _emit_digits(builder: ir.IRBuilder, x: ir.Value) -> Values:
    if _permutes_bytes():
        digits = _digits_of_bytes(np.arange(256)).astype(np.uint8)
        four = digits[:, 0] | digits[:, 1] << 2 | digits[:, 2] << 4 | digits[:, 3] << 6
        tables = (("localllm.digits", four), ("localllm.digits.last", digits[:, 4]))
        found, last = (builder.bitcast(_permuted(builder, *each, x, x), i32x16.llvm) for each in tables)
        return [*(_and(builder, _right(builder, found, 2 * i), 0x03030303) for i in range(4)), last]
    even, odd = _and(builder, x, 0x00FF00FF), _and(builder, _right(builder, x, 8), 0x00FF00FF)
    words, three = [], constant(i32x16.llvm, 3)
    for _ in range(_DIGITS):
        even, odd = builder.mul(even, three), builder.mul(odd, three)
        upper = _and(builder, _right(builder, even, 8), 0x00FF00FF)
        words.append(builder.or_(upper, _and(builder, odd, 0x03000300)))
        even, odd = _and(builder, even, 0x00FF00FF), _and(builder, odd, 0x00FF00FF)
    return words


def _meaning_of_digits(x: Lanes) -> tuple[Lanes, ...]:
    digits = _digits_of_bytes(x.view(np.uint8)).astype(np.uint8)
    return tuple(np.ascontiguousarray(digits[:, i]).view(np.int32) for i in range(_DIGITS))


base_3_digits = Intrinsic(
    "base_3_digits", _emit_digits, _meaning_of_digits, 1, [i32x16], lambda _x: TupleOf(i32x16, _DIGITS)
)
"""Five vectors: the base-3 digits, highest first, of each byte, which encodes them as a fraction of 256."""
