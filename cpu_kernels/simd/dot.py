"""The one primitive that differs between processors: products of bytes, added in fours (and of words, in twos).

dot4(acc, u, s): acc.i32[lane] += sum over the lane's four bytes of unsigned u times signed s, exactly, on every
instruction set. u and s come as sixteen 32-bit lanes. dot2 does the same with two signed 16-bit words a lane.
"""

from llvmlite import ir

from cpu_kernels.isa import ISA, Isa
from cpu_kernels.simd.vectors import I8, I16, I32, call, constant, define, i32x16


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


def in_parts(builder: ir.IRBuilder, name: str, parts: int, *operands: ir.Value) -> ir.Value:
    """Apply an LLVM intrinsic of narrower vectors to each of `parts` pieces, whose type is also its result's."""
    pieces = [[_part(builder, v, index, parts) for v in operands] for index in range(parts)]
    return _join(builder, [call(builder, name, piece[0].type, *piece) for piece in pieces])


def _words(builder: ir.IRBuilder, value: ir.Value, signed: bool) -> tuple[ir.Value, ir.Value]:
    """Even and odd bytes of a vector, each widened to 16-bit words in place."""
    words = builder.bitcast(value, ir.VectorType(I16, 32))
    eight = constant(words.type, 8)
    if signed:
        return builder.ashr(builder.shl(words, eight), eight), builder.ashr(words, eight)
    return builder.and_(words, constant(words.type, 0xFF)), builder.lshr(words, eight)


def _multiply_words(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Products of 16-bit words added in pairs to 32 bits (pmaddwd)."""
    if ISA in (Isa.AVX512, Isa.AVX512_VNNI):
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", i32x16.llvm, x, y)
    name = "llvm.x86.avx2.pmadd.wd"
    half = ir.VectorType(I32, 8)
    halves = [call(builder, name, half, _part(builder, x, i, 2), _part(builder, y, i, 2)) for i in range(2)]
    return _join(builder, halves)


def _dot4_words(builder: ir.IRBuilder, acc: ir.Value, u: ir.Value, s: ir.Value) -> ir.Value:
    """Through 16-bit words: pmaddubsw alone would saturate when weights use all eight bits."""
    for x, y in zip(_words(builder, u, signed=False), _words(builder, s, signed=True), strict=True):
        acc = builder.add(acc, _multiply_words(builder, x, y))
    return acc


def _dot4_neon(builder: ir.IRBuilder, acc: ir.Value, u: ir.Value, s: ir.Value) -> ir.Value:
    """sdot is signed by signed: u = (u - 128) + 128, and the second term is a dot product with ones."""
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    centred = builder.xor(builder.bitcast(u, ir.VectorType(I8, 64)), constant(ir.VectorType(I8, 64), -128))
    ones = constant(ir.VectorType(I8, 64), 1)
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


def multiply_bytes(builder: ir.IRBuilder, acc: ir.Value, u: ir.Value, s: ir.Value) -> ir.Value:
    """Emit dot4 for the chosen instruction set."""
    if ISA is Isa.AVX512_VNNI:
        return _split_call(builder, "llvm.x86.avx512.vpdpbusd.512", 1, I8, acc, u, s)
    if ISA is Isa.AVX_VNNI:
        return _split_call(builder, "llvm.x86.avx512.vpdpbusd.256", 2, I8, acc, u, s)
    if ISA in (Isa.AVX512, Isa.AVX2):
        return _dot4_words(builder, acc, u, s)
    if ISA is Isa.NEON_DOT:
        return _dot4_neon(builder, acc, u, s)
    return _dot4_portable(builder, acc, u, s)


def multiply_pairs(builder: ir.IRBuilder, acc: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """Emit dot2 for the chosen instruction set."""
    if ISA is Isa.AVX512_VNNI:
        return _split_call(builder, "llvm.x86.avx512.vpdpwssd.512", 1, I16, acc, x, y)
    if ISA in (Isa.AVX512, Isa.AVX2, Isa.AVX_VNNI):
        words = ir.VectorType(I16, 32)
        return builder.add(acc, _multiply_words(builder, builder.bitcast(x, words), builder.bitcast(y, words)))
    sixteen = constant(i32x16.llvm, 16)
    low = builder.mul(builder.ashr(builder.shl(x, sixteen), sixteen), builder.ashr(builder.shl(y, sixteen), sixteen))
    high = builder.mul(builder.ashr(x, sixteen), builder.ashr(y, sixteen))
    return builder.add(acc, builder.add(low, high))


dot4 = define("dot4", i32x16(i32x16, i32x16, i32x16), multiply_bytes)
dot2 = define("dot2", i32x16(i32x16, i32x16, i32x16), multiply_pairs)
