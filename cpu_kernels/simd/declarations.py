"""How kernels name types, signatures and intrinsics before there is a compiler.

Importing Numba takes longer than loading compiled kernels. So modules declare what they need with these few classes at
import, and cpu_kernels.compiler turns them into Numba's own where something is compiled.

An intrinsic has an emitter, which writes LLVM instructions, and a meaning, which computes the same in Python. Called
from Python it computes, so that every kernel also runs as the Python function that it is: slowly, and without the
compiler. That is the reference which compiled kernels are compared with (cpu_kernels.self_check).
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

Emit = Callable[..., ir.Value | None]


class Kind:
    """A type, by Numba's name for it. Called with the types of arguments, it gives the signature that returns it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> "Signature":
        return Signature(self, arguments)


class Vector(Kind):
    """A vector of `lanes` values of one LLVM element type. In Python, a NumPy array."""

    def __init__(self, element: ir.Type, lanes: int) -> None:
        self.llvm = ir.VectorType(element, lanes)
        super().__init__(f"vector_{element}x{lanes}")


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function returns and takes: kinds, or Numba's own types where a typer was given those."""

    result: Any
    arguments: Sequence[Any]


class Intrinsic:
    """An operation of LLVM instructions for compiled functions; see the module's docstring.

    typer(context, *types of the arguments) returns a signature and codegen(context, builder, signature, values), or
    None for types that it does not take. literals: whether it wants to see the values of literals in their types.
    """

    def __init__(self, typer: Callable[..., Any], meaning: Callable[..., Any], literals: bool) -> None:
        self.__name__ = typer.__name__
        self.__doc__ = typer.__doc__
        self.typer = typer
        self.literals = literals
        self._meaning = meaning

    def __call__(self, *arguments: Any) -> Any:
        """Compute it in Python."""
        return self._meaning(*arguments)

    @property
    def _numba_type_(self) -> Any:
        """What Numba asks a global for."""
        from cpu_kernels.compiler import intrinsic_type

        return intrinsic_type(self)


def intrinsic(meaning: Callable[..., Any], *, literals: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that makes a typer an intrinsic. literals: it needs the values of some arguments (literal_value)."""
    return lambda typer: Intrinsic(typer, meaning, literals)


def define(name: str, signature: Signature, emit: Emit, meaning: Callable[..., Any]) -> Any:
    """Return an intrinsic of one fixed signature that emits emit(builder, *values)."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        result = emit(builder, *args)
        return context.get_dummy_value() if result is None else result

    return named(name, len(signature.arguments), lambda *_: (signature, codegen), meaning)


def named(
    name: str, arity: int, typer: Callable[..., Any], meaning: Callable[..., Any], *, literals: bool = False
) -> Intrinsic:
    """An intrinsic of a name and a number of arguments, whose typer takes any."""

    def with_signature(*arguments: Any) -> Any:
        return typer(*arguments)

    # Numba reads the arguments off the typer.
    kind, names = inspect.Parameter.POSITIONAL_OR_KEYWORD, ("context", *(f"argument_{i}" for i in range(arity)))
    vars(with_signature)["__signature__"] = inspect.Signature([inspect.Parameter(each, kind) for each in names])
    with_signature.__name__ = with_signature.__qualname__ = name
    return Intrinsic(with_signature, meaning, literals)


def literal_value(type_: Any) -> int | None:
    """The value of an argument that is a literal, None for a variable."""
    return getattr(type_, "literal_value", None)


def is_tuple(type_: Any) -> bool:
    """Whether a type is that of a tuple, whose length is its `count`."""
    return hasattr(type_, "count")


def tuple_of(kind: Kind, count: int) -> Any:
    """Numba's type of a tuple of `count` values of a kind; for typers, which run when there is a compiler."""
    from cpu_kernels.compiler import tuple_type

    return tuple_type(kind, count)


none, int32, int64, float32, address = (Kind(name) for name in ("none", "int32", "int64", "float32", "intp"))
