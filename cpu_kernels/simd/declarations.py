"""How kernels name types, signatures and intrinsics before there is a compiler.

Importing Numba takes longer than loading compiled kernels. So what modules declare at import is written down in these
few classes, and cpu_kernels.compiler makes Numba's own of it where something is compiled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir


class Kind:
    """A type, by Numba's name for it. Called with the types of arguments, it gives the signature that returns it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> "Signature":
        return Signature(self, arguments)


class Vector(Kind):
    """A vector of `lanes` values of one LLVM element type."""

    def __init__(self, element: ir.Type, lanes: int) -> None:
        self.llvm = ir.VectorType(element, lanes)
        super().__init__(f"vector_{element}x{lanes}")


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function returns and takes: kinds, or Numba's own types where a typer was given those."""

    result: Any
    arguments: Sequence[Any]


class Intrinsic:
    """What compiled functions call and LLVM instructions stand for.

    typer(context, *types of the arguments) returns a signature and codegen(context, builder, signature, values), or
    None for types that it does not take. literals: whether it wants to see the values of literals in their types.
    """

    def __init__(self, typer: Callable[..., Any], literals: bool) -> None:
        self.__name__ = typer.__name__
        self.__doc__ = typer.__doc__
        self.typer = typer
        self.literals = literals

    @property
    def _numba_type_(self) -> Any:
        """What Numba asks a global for."""
        from cpu_kernels.compiler import intrinsic_type

        return intrinsic_type(self)


def intrinsic(typer: Callable[..., Any]) -> Any:
    """Decorator that makes a typer an intrinsic."""
    return Intrinsic(typer, literals=False)


def intrinsic_of_literals(typer: Callable[..., Any]) -> Any:
    """Decorator that makes an intrinsic of a typer which needs the values of some arguments: see literal_value."""
    return Intrinsic(typer, literals=True)


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
