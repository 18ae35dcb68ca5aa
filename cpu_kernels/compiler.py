"""Compiling kernels with Numba: what a declaration becomes for it, and a function becomes as machine code.

Imported only where a kernel is not in the cache. Compiled code holds no reference to the interpreter: kernels have no
Python objects and never raise, so that what is left of Numba in them is its naming of symbols.
"""

import functools
import itertools
import secrets
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import compiler, types
from numba.core.bytecode import FunctionIdentity
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.typing import signature
from numba.core.typing.templates import make_intrinsic_template
from numba.extending import models, register_model

from cpu_kernels.simd.declarations import Intrinsic, Kind, Signature, Vector

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": False}

# Numba counts the functions of a process and names symbols by the count. A process loads from the cache what several
# have compiled, and a symbol that two named alike would send calls astray: so each begins at a place of its own.
FunctionIdentity._unique_ids = itertools.count(secrets.randbits(60))


class _VectorType(types.Type):
    """Numba type of a vector, which lives in registers as the LLVM vector itself."""

    def __init__(self, kind: Vector) -> None:
        self.llvm = kind.llvm
        super().__init__(name=kind.name)


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend: _VectorType) -> None:
        super().__init__(manager, frontend, frontend.llvm)


@functools.cache
def _of_kind(kind: Kind) -> Any:
    return _VectorType(kind) if isinstance(kind, Vector) else getattr(types, kind.name)


def _known(type_: Any) -> Any:
    return _of_kind(type_) if isinstance(type_, Kind) else type_


def tuple_type(kind: Kind, count: int) -> Any:
    """Numba's type of a tuple of `count` values of a kind."""
    return types.containers.UniTuple(_of_kind(kind), count)


@functools.cache
def intrinsic_type(declared: Intrinsic) -> Any:
    """Numba's type of a declared intrinsic."""

    @functools.wraps(declared.typer)
    def typer(context: Any, *arguments: Any) -> Any:
        found = declared.typer(context, *arguments)
        if found is None:
            return None
        given, codegen = found
        if isinstance(given, Signature):
            return signature(_known(given.result), *map(_known, given.arguments)), codegen
        return signature(given.return_type, *map(_known, given.args)), codegen

    template = make_intrinsic_template(declared, typer, declared.__name__, prefer_literal=declared.literals)
    return types.Function(template)


@functools.cache
def dispatcher(function: Callable[..., Any]) -> Any:
    """What Numba makes of a function that compiled functions call."""
    return numba.njit(**_OPTIONS, nogil=True)(function)


@global_compiler_lock
def compile_kernel(function: Callable[[int, int, int, int], None], symbol: str) -> bytes:
    """Compile a function with the kernel signature; return an object file whose `symbol` is its C function."""
    flags = compiler.Flags()
    cpu_target.options.parse_as_flags(flags, _OPTIONS)
    # LLVM's intermediate code alone, so that an entry can be added.
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    flags.enable_pyobject = flags.force_pyobject = False
    context = cpu_target.target_context
    result = compiler.compile_extra(
        cpu_target.typing_context, context, function, (types.intp,) * 4, types.void, flags, {}
    )
    library, native = result.library, result.fndesc
    module = context.create_module("entry")
    integers = [context.get_value_type(type_) for type_ in native.argtypes]
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), integers), symbol)
    builder = ir.IRBuilder(entry.append_basic_block("entry"))
    callee = ir.Function(
        module, context.call_conv.get_function_type(native.restype, native.argtypes), native.llvm_func_name
    )
    context.call_conv.call_function(builder, callee, native.restype, native.argtypes, entry.args, attrs=("noinline",))
    builder.ret_void()
    library.add_ir_module(module)
    library.finalize()
    _, _, (code, _) = library.serialize_using_object_code()
    return bytes(code)
