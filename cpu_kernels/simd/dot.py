"""The one primitive that differs between processors: products of bytes, added in fours (and of words, in twos).

Operands are sixteen 32-bit lanes of four bytes: weights, and activations s >= -127. Results are exact on every
instruction set. Most have one instruction, or a few, for acc[lane] += sum of unsigned u times signed s. AVX2 only
multiplies bytes into 16-bit words, pairs of products added, where full bytes would saturate. So there are two kinds of
products, which are the same elsewhere:

- multiply_short, of small bytes into short sums. On AVX2 a short sum's lane is two words and stands for their sum; the
  words hold as long as steps added * largest u <= SHORT_LIMIT. widen_short makes a 32-bit sum of it.
- multiply_biased, of signed bytes that are stored plus BYTE_OFFSET, into a 32-bit sum that began with biased_start.
  Where the offset is 128, the start takes it away again.
"""

from llvmlite import ir

from cpu_kernels.isa import ISA, Isa
from cpu_kernels.simd.vectors import I8, I16, I32, call, constant, define, i32x16

SHORT_LIMIT = 32767 // (2 * 127)
BYTE_OFFSET = 0 if ISA is Isa.AVX2 else 128
# Accumulators of two registers each that leave some of sixteen for operands.
_HELD = 6
_BYTES, _WORDS = ir.VectorType(I8, 64), ir.VectorType(I16, 32)


def _part(builder: ir.IRBuilder, value: ir.Value, index: int, parts: int) -> ir.Value:
    """One of `parts` equal pieces of a vector."""
    lanes = value.type.count // parts
    order = list(range(index * lanes, (index + 1) * lanes))
    return builder.shuffle_vector(
        value, ir.Constant(value.type, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), order)
    )


def _join(builder: ir.IRBuilder, pieces: list[ir.Value]) -> ir.Value:
    while len(pieces) > 1:
        lanes = 2 * pieces[0].type.count
        order = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        pieces = [builder.shuffle_vector(a, b, order) for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def _split_call(builder: ir.IRBuilder, name: str, parts: int, element: ir.Type, *args: ir.Value) -> ir.Value:
    """Apply name(acc, x, y) piecewise; x and y are recast to `element` lanes."""
    acc, *operands = args
    count = 512 // element.width
    operands = [builder.bitcast(v, ir.VectorType(element, count)) for v in operands]
    pieces = []
    for index in range(parts):
        piece = [_part(builder, v, index, parts) if parts > 1 else v for v in (acc, *operands)]
        pieces.append(call(builder, name, piece[0].type, *piece))
    return _join(builder, pieces)


def in_parts(
    builder: ir.IRBuilder, name: str, parts: int, *operands: ir.Value, result: ir.Type | None = None
) -> ir.Value:
    """Apply an LLVM intrinsic of narrower vectors to each of `parts` pieces; result: its type, if not the pieces'."""
    pieces = [[_part(builder, v, index, parts) for v in operands] for index in range(parts)]
    return _join(builder, [call(builder, name, result or piece[0].type, *piece) for piece in pieces])


def _words(builder: ir.IRBuilder, value: ir.Value, signed: bool) -> tuple[ir.Value, ir.Value]:
    """Even and odd bytes of a vector, each widened to 16-bit words in place."""
    words = builder.bitcast(value, _WORDS)
    eight = constant(words.type, 8)
    if signed:
        return builder.ashr(builder.shl(words, eight), eight), builder.ashr(words, eight)
    return builder.and_(words, constant(words.type, 0xFF)), builder.lshr(words, eight)


def _multiply_words(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Products of 16-bit words added in pairs to 32 bits (pmaddwd)."""
    if ISA in (Isa.AVX512, Isa.AVX512_VNNI):
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", i32x16.llvm, x, y)
    return in_parts(builder, "llvm.x86.avx2.pmadd.wd", 2, x, y, result=ir.VectorType(I32, 8))


def _dot4_words(builder: ir.IRBuilder, acc: ir.Value, u: ir.Value, s: ir.Value) -> ir.Value:
    """Through 16-bit words: pmaddubsw would saturate when weights use all eight bits."""
    for x, y in zip(_words(builder, u, signed=False), _words(builder, s, signed=True), strict=True):
        acc = builder.add(acc, _multiply_words(builder, x, y))
    return acc


def _dot4_neon(builder: ir.IRBuilder, acc: ir.Value, u: ir.Value, s: ir.Value) -> ir.Value:
    """sdot is signed by signed: u = (u - 128) + 128, and the second term is a dot product with ones."""
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    centred = builder.xor(builder.bitcast(u, _BYTES), constant(_BYTES, -128))
    ones = constant(_BYTES, 1)
    sums = _split_call(builder, name, 4, I8, constant(i32x16.llvm, 0), ones, s)
    acc = builder.add(acc, builder.shl(sums, constant(i32x16.llvm, 7)))
    return _split_call(builder, name, 4, I8, acc, centred, s)


def _dot4_portable(builder: ir.IRBuilder, acc: ir.Value, u: ir.Value, s: ir.Value) -> ir.Value:
    for byte in range(4):
        up = constant(i32x16.llvm, 24 - 8 * byte)
        down = constant(i32x16.llvm, 24)
        x = builder.lshr(builder.shl(u, up), down)
        y = builder.ashr(builder.shl(s, up), down)
        acc = builder.add(acc, builder.mul(x, y))
    return acc


def _multiply_bytes(builder: ir.IRBuilder, acc: ir.Value, u: ir.Value, s: ir.Value) -> ir.Value:
    """acc + the products of unsigned and signed bytes, on an instruction set other than AVX2."""
    if ISA is Isa.AVX512_VNNI:
        return _split_call(builder, "llvm.x86.avx512.vpdpbusd.512", 1, I8, acc, u, s)
    if ISA is Isa.AVX_VNNI:
        return _split_call(builder, "llvm.x86.avx512.vpdpbusd.256", 2, I8, acc, u, s)
    if ISA is Isa.AVX512:
        return _dot4_words(builder, acc, u, s)
    if ISA is Isa.NEON_DOT:
        return _dot4_neon(builder, acc, u, s)
    return _dot4_portable(builder, acc, u, s)


def has_short_sums() -> bool:
    """Whether a short sum is something else than a 32-bit sum."""
    return ISA is Isa.AVX2


def _pairs_of_products(builder: ir.IRBuilder, u: ir.Value, s: ir.Value) -> ir.Value:
    """u * s added in pairs to 16-bit words, which saturate beyond u = 128 (AVX2)."""
    u, s = (builder.bitcast(v, _BYTES) for v in (u, s))
    return in_parts(builder, "llvm.x86.avx2.pmadd.ub.sw", 2, u, s, result=ir.VectorType(I16, 16))


def in_order(builder: ir.IRBuilder, values: list[ir.Value]) -> list[ir.Value]:
    """The same values, all computed before what follows; unchanged where there are more than registers hold.

    Sixteen registers hold a tile only if its steps follow each other; LLVM would reorder the additions of many. An
    empty piece of assembly that takes and gives all values keeps them in order and costs nothing.
    """
    if not has_short_sums() or len(values) > _HELD:
        return values
    halves = [_part(builder, value, i, 2) for value in values for i in range(2)]
    kinds = [half.type for half in halves]
    outputs = ",".join(["=x"] * len(halves) + [str(i) for i in range(len(halves))])
    function = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    kept = builder.asm(function, "", outputs, halves, side_effect=False)
    halves = [builder.extract_value(kept, i) for i in range(len(halves))]
    return [_join(builder, halves[i : i + 2]) for i in range(0, len(halves), 2)]


def multiply_short(builder: ir.IRBuilder, short: ir.Value, u: ir.Value, s: ir.Value) -> ir.Value:
    """A short sum plus the products of small unsigned bytes and signed ones."""
    if not has_short_sums():
        return _multiply_bytes(builder, short, u, s)
    words = builder.add(builder.bitcast(short, _WORDS), _pairs_of_products(builder, u, s))
    return builder.bitcast(words, i32x16.llvm)


def widen_short(builder: ir.IRBuilder, short: ir.Value, factor: ir.Value | None = None) -> ir.Value:
    """The 32-bit sum that a short sum stands for, times what factor_of_short made of a factor if there is one."""
    if not has_short_sums():
        return short if factor is None else builder.mul(short, factor)
    words = constant(_WORDS, 1)
    if factor is not None:
        words = builder.bitcast(factor, _WORDS)
    return _multiply_words(builder, builder.bitcast(short, _WORDS), words)


def factor_of_short(builder: ir.IRBuilder, factor: ir.Value) -> ir.Value:
    """A factor (lanes in -32768..32767) as widen_short multiplies it."""
    if not has_short_sums():
        return factor
    twice = ir.Constant(ir.VectorType(I32, 32), [i // 2 * 2 for i in range(32)])
    words = builder.bitcast(factor, _WORDS)
    return builder.bitcast(builder.shuffle_vector(words, ir.Constant(_WORDS, ir.Undefined), twice), i32x16.llvm)


def multiply_biased(builder: ir.IRBuilder, acc: ir.Value, stored: ir.Value, s: ir.Value) -> ir.Value:
    """acc + the products of signed bytes stored plus BYTE_OFFSET and signed ones."""
    if not has_short_sums():
        return _multiply_bytes(builder, acc, stored, s)
    # The weight's size times the activation with the weight's sign: at most 128 * 127 * 2 in a word.
    signed = builder.bitcast(stored, _BYTES)
    size = call(builder, "llvm.abs.v64i8", _BYTES, signed, ir.IntType(1)(0))
    turned = in_parts(builder, "llvm.x86.avx2.psign.b", 2, builder.bitcast(s, _BYTES), signed)
    return builder.add(acc, _multiply_words(builder, _pairs_of_products(builder, size, turned), constant(_WORDS, 1)))


def biased_start(builder: ir.IRBuilder, minus_128_sums: ir.Value) -> ir.Value:
    """What a sum of multiply_biased begins with, given -128 times the sum of the activations."""
    return constant(i32x16.llvm, 0) if has_short_sums() else minus_128_sums


def multiply_pairs(builder: ir.IRBuilder, acc: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """acc + the products of signed words, added in twos."""
    if ISA is Isa.AVX512_VNNI:
        return _split_call(builder, "llvm.x86.avx512.vpdpwssd.512", 1, I16, acc, x, y)
    if ISA in (Isa.AVX512, Isa.AVX2, Isa.AVX_VNNI):
        return builder.add(acc, _multiply_words(builder, builder.bitcast(x, _WORDS), builder.bitcast(y, _WORDS)))
    sixteen = constant(i32x16.llvm, 16)
    low = builder.mul(builder.ashr(builder.shl(x, sixteen), sixteen), builder.ashr(builder.shl(y, sixteen), sixteen))
    high = builder.mul(builder.ashr(x, sixteen), builder.ashr(y, sixteen))
    return builder.add(acc, builder.add(low, high))


dot2 = define("dot2", i32x16(i32x16, i32x16, i32x16), multiply_pairs)
