"""Products and lookups of bytes, for which instruction sets differ.

Operands are sixteen 32-bit lanes of four bytes: weights, and activations s >= -127. A product sums four bytes per lane,
exactly on every instruction set. Most sets have one or a few instructions for acc[lane] += sum of unsigned u times
signed s. Others only multiply bytes to 16-bit words and add pairs of them (pmaddubsw), which would saturate for full
bytes. So there are two kinds of products, which are the same if one instruction does it all:

- Small unsigned bytes, up to 127, into partial sums. If `POLICY.int16_accumulators`, a lane of a partial sum is two
  words, which stand for their sum. They do not overflow while the number of products added * largest u <=
  PARTIAL_LIMIT.
- Any bytes in offset binary: signed ones stored plus BYTE_OFFSET, which suits the instruction: 128 if it takes unsigned
  weights, 0 if signed ones. If it is 128, a sum starts with -128 times the sum of the activations as correction.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from cpu_kernels.declarations import define
from cpu_kernels.isa import POLICY, Isa, emitted_isa
from cpu_kernels.simd.vectors import (
    I1,
    I8,
    I16,
    I32,
    Lanes,
    at,
    broadcast,
    call,
    constant,
    i32x16,
    in_parts,
    join,
    load,
    piece,
)

PARTIAL_LIMIT = 32767 // (2 * 127)
BYTE_OFFSET = POLICY.byte_offset
_BYTES, _WORDS = ir.VectorType(I8, 64), ir.VectorType(I16, 32)
_ZERO = constant(i32x16.llvm, 0)
_WIDE, _NARROW = (Isa.AVX512_VNNI, Isa.AVX512), (Isa.AVX_VNNI, Isa.AVX2)
# Register width in bits of the multiply-accumulate instructions, and registers per vector.
_DOT_INSTRUCTIONS = {Isa.AVX512_VNNI: (512, 1), Isa.AVX_VNNI: (256, 2)}


def _in_words(builder: ir.IRBuilder, value: ir.Value, signed: bool) -> tuple[ir.Value, ir.Value]:
    """Even and odd bytes of a vector, each widened to a 16-bit word in place."""
    words, eight = builder.bitcast(value, _WORDS), constant(_WORDS, 8)
    if signed:
        return builder.ashr(builder.shl(words, eight), eight), builder.ashr(words, eight)
    return builder.and_(words, constant(_WORDS, 0xFF)), builder.lshr(words, eight)


def _multiply_words(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Products of signed words, added in pairs to 32 bits (pmaddwd)."""
    x, y = builder.bitcast(x, _WORDS), builder.bitcast(y, _WORDS)
    if emitted_isa() in _WIDE:
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", i32x16.llvm, x, y)
    if emitted_isa() in _NARROW:
        return in_parts(builder, "llvm.x86.avx2.pmadd.wd", 2, x, y, result=ir.VectorType(I32, 8))
    x, y, sixteen = builder.bitcast(x, i32x16.llvm), builder.bitcast(y, i32x16.llvm), constant(i32x16.llvm, 16)
    low = builder.mul(builder.ashr(builder.shl(x, sixteen), sixteen), builder.ashr(builder.shl(y, sixteen), sixteen))
    return builder.add(low, builder.mul(builder.ashr(x, sixteen), builder.ashr(y, sixteen)))


def multiply_words(builder: ir.IRBuilder, acc: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """acc + the products of signed words, added in pairs."""
    if emitted_isa() in _DOT_INSTRUCTIONS:
        bits, parts = _DOT_INSTRUCTIONS[emitted_isa()]
        x, y = builder.bitcast(x, _WORDS), builder.bitcast(y, _WORDS)
        return in_parts(builder, f"llvm.x86.avx512.vpdpwssd.{bits}", parts, acc, x, y)
    return builder.add(acc, _multiply_words(builder, x, y))


def operand(builder: ir.IRBuilder, x: ir.Value, index: int) -> ir.Value:
    """The 32-bit integer of this index at x in every lane, as a factor of products. Reads aligned groups of four.

    On ARM one load serves four products, because sdot takes its factor from any lane of a register.
    """
    if emitted_isa() is not Isa.NEON_DOT:
        return broadcast(builder, at(builder, x, 4 * index), I32)
    four = load(builder, at(builder, x, index // 4 * 16), ir.VectorType(I32, 4), 4)
    every = ir.Constant(i32x16.llvm, [index % 4] * i32x16.llvm.count)
    return builder.shuffle_vector(four, ir.Constant(four.type, ir.Undefined), every)


def _multiply_bytes(builder: ir.IRBuilder, acc: ir.Value, weights: ir.Value, s: ir.Value, signed: bool) -> ir.Value:
    """acc + the products of bytes and signed bytes. signed: whether the weights are, else unsigned; up to 127 both."""
    isa = emitted_isa()
    if isa is Isa.NEON_DOT:
        weights, s = builder.bitcast(weights, _BYTES), builder.bitcast(s, _BYTES)
        return in_parts(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", 4, acc, weights, s)
    if isa in _DOT_INSTRUCTIONS:
        bits, parts = _DOT_INSTRUCTIONS[isa]
        weights, s = builder.bitcast(weights, _BYTES), builder.bitcast(s, _BYTES)
        return in_parts(builder, f"llvm.x86.avx512.vpdpbusd.{bits}", parts, acc, weights, s)
    for x, y in zip(_in_words(builder, weights, signed), _in_words(builder, s, signed=True), strict=True):
        acc = builder.add(acc, _multiply_words(builder, x, y))
    return acc


def _pairs_of_products(builder: ir.IRBuilder, u: ir.Value, s: ir.Value) -> ir.Value:
    """u * s added in pairs to 16-bit words, which saturate for u > 128."""
    u, s = (builder.bitcast(v, _BYTES) for v in (u, s))
    if emitted_isa() in _WIDE:
        return call(builder, "llvm.x86.avx512.pmaddubs.w.512", _WORDS, u, s)
    if emitted_isa() in _NARROW:
        return in_parts(builder, "llvm.x86.avx2.pmadd.ub.sw", 2, u, s, result=ir.VectorType(I16, 16))
    even, odd = zip(_in_words(builder, u, signed=False), _in_words(builder, s, signed=True), strict=True)
    return builder.add(builder.mul(*even), builder.mul(*odd))


def _with_sign(builder: ir.IRBuilder, s: ir.Value, sign: ir.Value) -> ir.Value:
    """Bytes s, negated where `sign` is negative."""
    if emitted_isa() in _NARROW:
        return in_parts(builder, "llvm.x86.avx2.psign.b", 2, s, sign)
    negative = builder.icmp_signed("<", sign, constant(_BYTES, 0))
    return builder.select(negative, builder.sub(constant(_BYTES, 0), s), s)


def multiply_small(builder: ir.IRBuilder, partial: ir.Value, u: ir.Value, s: ir.Value) -> ir.Value:
    """A partial sum plus the products of small unsigned bytes and signed ones."""
    if not POLICY.int16_accumulators:
        return _multiply_bytes(builder, partial, u, s, signed=False)
    words = builder.add(builder.bitcast(partial, _WORDS), _pairs_of_products(builder, u, s))
    return builder.bitcast(words, i32x16.llvm)


def widen_partial(builder: ir.IRBuilder, partial: ir.Value, factor: ir.Value | None = None) -> ir.Value:
    """The 32-bit sum that a partial sum stands for, times a factor made by partial_factor if one is given."""
    if not POLICY.int16_accumulators:
        return partial if factor is None else builder.mul(partial, factor)
    return _multiply_words(builder, partial, constant(_WORDS, 1) if factor is None else factor)


def _factor(builder: ir.IRBuilder, factor: ir.Value) -> ir.Value:
    if not POLICY.int16_accumulators:
        return factor
    twice = ir.Constant(ir.VectorType(I32, 32), [i // 2 * 2 for i in range(32)])
    words = builder.bitcast(factor, _WORDS)
    return builder.bitcast(builder.shuffle_vector(words, ir.Constant(_WORDS, ir.Undefined), twice), i32x16.llvm)


def multiply_offset(builder: ir.IRBuilder, acc: ir.Value, stored: ir.Value, s: ir.Value) -> ir.Value:
    """acc + the products of bytes in offset binary and signed ones."""
    if not POLICY.int16_accumulators:
        return _multiply_bytes(builder, acc, stored, s, signed=POLICY.byte_offset == 0)
    # The weight's magnitude times the activation with the weight's sign: at most 128 * 127 * 2 in a word.
    signed = builder.bitcast(stored, _BYTES)
    size = call(builder, "llvm.abs.v64i8", _BYTES, signed, I1(0))
    pairs = _pairs_of_products(builder, size, _with_sign(builder, builder.bitcast(s, _BYTES), signed))
    return builder.add(acc, _multiply_words(builder, pairs, constant(_WORDS, 1)))


def add_small(builder: ir.IRBuilder, acc: ir.Value, u: ir.Value, s: ir.Value) -> ir.Value:
    """A 32-bit sum plus the products of small unsigned bytes and signed ones."""
    if not POLICY.int16_accumulators:
        return multiply_small(builder, acc, u, s)
    return builder.add(acc, widen_partial(builder, multiply_small(builder, _ZERO, u, s)))


def offset_start(minus_128_sums: ir.Value) -> ir.Value:
    """The initial value of a sum of multiply_offset, given -128 times the sum of the activations."""
    return minus_128_sums if BYTE_OFFSET else _ZERO


def keep_order(builder: ir.IRBuilder, values: list[ir.Value], most: int) -> list[ir.Value]:
    """The same values, which LLVM must compute before what follows; without effect for more than `most` values.

    Where registers are few, a tile fits only if its steps run in order, but LLVM would reorder additions across steps.
    An empty inline assembly that takes and returns all values keeps the order at no cost.
    """
    parts = POLICY.vector_parts
    if len(values) > most or emitted_isa() not in _WIDE + _NARROW:
        return values
    pieces = [piece(builder, value, i, parts) for value in values for i in range(parts)]
    kinds = [each.type for each in pieces]
    register = "v" if emitted_isa() in _WIDE else "x"
    outputs = ",".join([f"={register}"] * len(pieces) + [str(i) for i in range(len(pieces))])
    result = ir.LiteralStructType(kinds) if len(kinds) > 1 else kinds[0]
    kept = builder.asm(ir.FunctionType(result, kinds), "", outputs, pieces, side_effect=False)
    pieces = [builder.extract_value(kept, i) for i in range(len(pieces))] if len(kinds) > 1 else [kept]
    return [join(builder, pieces[i : i + parts]) for i in range(0, len(pieces), parts)]


def is_neon() -> bool:
    """Whether code is emitted for ARM, where bytes can be shifted and products take their weights from registers."""
    return emitted_isa() is Isa.NEON_DOT


def shift_bytes(builder: ir.IRBuilder, value: ir.Value, bits: int) -> ir.Value:
    """Each byte of sixteen lanes shifted right, which takes x86 a mask besides."""
    return builder.bitcast(builder.lshr(builder.bitcast(value, _BYTES), constant(_BYTES, bits)), i32x16.llvm)


def take_turns(builder: ir.IRBuilder, sums: list[ir.Value], *addresses: ir.Value) -> tuple[list[ir.Value], Any]:
    """The same sums and addresses. LLVM must compute the sums before it loads from the addresses.

    It would load the weights of many steps in advance, and then store what does not fit into registers.
    """
    parts = POLICY.vector_parts
    pieces = [piece(builder, value, i, parts) for value in sums for i in range(parts)]
    values = [*pieces, *addresses]
    outputs = ["=w"] * len(pieces) + ["=r"] * len(addresses) + [str(i) for i in range(len(values))]
    result = ir.LiteralStructType([value.type for value in values])
    kept = builder.asm(ir.FunctionType(result, result.elements), "", ",".join(outputs), values, side_effect=False)
    values = [builder.extract_value(kept, i) for i in range(len(values))]
    joined = [join(builder, values[i : i + parts]) for i in range(0, len(pieces), parts)]
    return joined, values[len(pieces) :]


def _products(x: Lanes, y: Lanes, first: Any, second: Any) -> NDArray[np.int32]:
    """Products of the numbers in each lane, as [lane][number]."""
    return x.view(first).reshape(16, -1).astype(np.int32) * y.view(second).reshape(16, -1).astype(np.int32)


def added_small(partial: Lanes, u: Lanes, s: Lanes) -> Lanes:
    """multiply_small in Python."""
    products = _products(u, s, np.uint8, np.int8)
    if not POLICY.int16_accumulators:
        return partial + products.sum(axis=1, dtype=np.int32)
    return (partial.view(np.int16) + products.reshape(32, 2).sum(axis=1).astype(np.int16)).view(np.int32)


def widened(partial: Lanes, factor: Lanes | None = None) -> Lanes:
    """widen_partial in Python; the factor is made by partial_factor."""
    if not POLICY.int16_accumulators:
        return partial if factor is None else partial * factor
    ones = np.full(16, 0x00010001, np.int32)
    return _products(partial, ones if factor is None else factor, np.int16, np.int16).sum(axis=1, dtype=np.int32)


def added_small_wide(acc: Lanes, u: Lanes, s: Lanes) -> Lanes:
    """add_small in Python."""
    return acc + _products(u, s, np.uint8, np.int8).sum(axis=1, dtype=np.int32)


def added_offset(acc: Lanes, stored: Lanes, s: Lanes) -> Lanes:
    """multiply_offset in Python."""
    kind = np.uint8 if BYTE_OFFSET else np.int8
    return acc + _products(stored, s, kind, np.int8).sum(axis=1, dtype=np.int32)


def added_words(acc: Lanes, x: Lanes, y: Lanes) -> Lanes:
    """multiply_words in Python."""
    return acc + _products(x, y, np.int16, np.int16).sum(axis=1, dtype=np.int32)


def _doubled(factor: Lanes) -> Lanes:
    return factor.view(np.int16)[::2].repeat(2).view(np.int32) if POLICY.int16_accumulators else factor


# A factor (lanes in -32768..32767) in the form that widen_partial takes.
partial_factor = define("partial_factor", [i32x16], i32x16, _factor, _doubled)


def _select(builder: ir.IRBuilder, table: tuple[int, ...], indices: ir.Value) -> ir.Value:
    """A lookup without a byte shuffle: compares with every index."""
    result = constant(_BYTES, table[0])
    for index, entry in enumerate(table[1:], start=1):
        chosen = builder.icmp_unsigned("==", indices, constant(_BYTES, index))
        result = builder.select(chosen, constant(_BYTES, entry), result)
    return result


def look_up(builder: ir.IRBuilder, table: tuple[int, ...], nibbles: ir.Value) -> ir.Value:
    """Replace nibbles, one per byte of sixteen 32-bit lanes, with the entries of a table of sixteen bytes."""
    indices, repeated = builder.bitcast(nibbles, _BYTES), ir.Constant(_BYTES, list(table) * 4)
    isa = emitted_isa()
    if isa in _WIDE:
        found = call(builder, "llvm.x86.avx512.pshuf.b.512", _BYTES, repeated, indices)
    elif isa in _NARROW:
        found = in_parts(builder, "llvm.x86.avx2.pshuf.b", 2, repeated, indices)
    elif isa is Isa.NEON_DOT:
        found = in_parts(builder, "llvm.aarch64.neon.tbl1.v16i8", 4, repeated, indices)
    else:
        found = _select(builder, table, indices)
    return builder.bitcast(found, i32x16.llvm)


def byte_values(table: tuple[int, ...]) -> Any:
    """An intrinsic values(nibbles): the table's entries, as bytes in offset binary, for nibbles in one byte each."""
    entries = tuple((entry + BYTE_OFFSET) % 256 for entry in table)

    def meaning(nibbles: Lanes) -> Lanes:
        return np.array(entries, np.uint8)[nibbles.view(np.uint8)].view(np.int32)

    return define("byte_values", [i32x16], i32x16, lambda b, nibbles: look_up(b, entries, nibbles), meaning)
