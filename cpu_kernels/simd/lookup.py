"""A table of sixteen bytes looked up by nibbles: sixty-four at once."""

from typing import Any

from llvmlite import ir

from cpu_kernels.isa import ISA, Isa
from cpu_kernels.simd.declarations import intrinsic
from cpu_kernels.simd.dot import in_parts
from cpu_kernels.simd.vectors import I8, call, constant, i32x16

_BYTES = ir.VectorType(I8, 64)


def _select(builder: ir.IRBuilder, table: tuple[int, ...], indices: ir.Value) -> ir.Value:
    """Without a byte shuffle: compare with every index."""
    result = constant(_BYTES, table[0])
    for index, entry in enumerate(table[1:], start=1):
        chosen = builder.icmp_unsigned("==", indices, constant(_BYTES, index))
        result = builder.select(chosen, constant(_BYTES, entry), result)
    return result


def table_bytes(builder: ir.IRBuilder, table: tuple[int, ...], nibbles: ir.Value) -> ir.Value:
    """Emit the lookup: sixteen 32-bit lanes of nibbles to the same of the table's bytes."""
    return builder.bitcast(_emit(builder, table, builder.bitcast(nibbles, _BYTES)), i32x16.llvm)


def _emit(builder: ir.IRBuilder, table: tuple[int, ...], indices: ir.Value) -> ir.Value:
    repeated = ir.Constant(_BYTES, list(table) * 4)
    if ISA in (Isa.AVX512_VNNI, Isa.AVX512):
        return call(builder, "llvm.x86.avx512.pshuf.b.512", _BYTES, repeated, indices)
    if ISA in (Isa.AVX_VNNI, Isa.AVX2):
        return in_parts(builder, "llvm.x86.avx2.pshuf.b", 2, repeated, indices)
    if ISA is Isa.NEON_DOT:
        return in_parts(builder, "llvm.aarch64.neon.tbl1.v16i8", 4, repeated, indices)
    return _select(builder, table, indices)


def lookup(name: str, table: tuple[int, ...]) -> Any:
    """Return an intrinsic that replaces each byte 0-15 of an i32x16 by the table's entry (sixteen bytes, 0-255)."""

    def typer(context: Any, nibbles: Any) -> Any:
        def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
            return table_bytes(builder, table, args[0])

        return i32x16(i32x16), codegen

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)
