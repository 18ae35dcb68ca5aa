"""The elements of kernels, declared without importing a compiler: types, intrinsics, and functions that use them.

Importing Numba takes longer than loading compiled kernels. So modules declare what they need with these few classes,
and cpu_kernels.compiler converts the declarations to Numba's types only when something is compiled.

An intrinsic has an emitter, which writes LLVM instructions, and a meaning, which computes the same in Python. A call
from Python runs the meaning, so every kernel also runs as a plain Python function: slowly, and without the compiler.
That is the reference for checking compiled kernels (cpu_kernels.self_check).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from llvmlite import ir

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Kind:
    """A type, identified by Numba's name for it."""

    def __init__(self, name: str) -> None:
        self.name = name


class Vector(Kind):
    """A vector of `lanes` values of one LLVM element type. In Python, a NumPy array."""

    def __init__(self, element: ir.Type, lanes: int) -> None:
        self.llvm = ir.VectorType(element, lanes)
        super().__init__(f"vector_{element}x{lanes}")


@dataclass(frozen=True)
class TupleOf:
    """A tuple of `count` values of a kind."""

    kind: Kind
    count: int


none, int32, int64, float32, float64, address = (
    Kind(name) for name in ("none", "int32", "int64", "float32", "float64", "intp")
)

Result = Kind | int | Callable[..., TupleOf] | None


@dataclass(frozen=True, eq=False)
class Intrinsic:
    """An operation made of LLVM instructions; see the module's docstring.

    emit(builder, *values) writes the instructions and returns the result's value. Tuples are passed and returned as
    lists of their members, literals as Python integers. arguments: their types, None to take those of each call.
    result: the type, or the index of the argument that has it, or a function of each argument's number of members (of a
    literal: its value). literals: indices of arguments that must be literals.
    """

    name: str
    emit: Callable[..., Any]
    meaning: Callable[..., Any]
    arity: int
    arguments: Sequence[Kind] | None
    result: Result
    literals: Sequence[int] = ()

    def __call__(self, *arguments: Any) -> Any:
        """Compute it in Python."""
        return self.meaning(*arguments)


def define(
    name: str, arguments: Sequence[Kind], result: Kind, emit: Callable[..., Any], meaning: Callable[..., Any]
) -> Any:
    """An intrinsic of fixed types."""
    return Intrinsic(name, emit, meaning, len(arguments), arguments, result)


def operation(
    meaning: Callable[..., Any], result: Result = None, literals: Sequence[int] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that turns an emitter into an intrinsic. result: as for Intrinsic; None for no result."""

    def declare(emit: Callable[..., Any]) -> Any:
        return Intrinsic(emit.__name__, emit, meaning, emit.__code__.co_argcount - 1, None, result, literals)

    return declare


class Inner:
    """A function that only compiled functions call; called from Python, it runs as a plain Python function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        """Compute it in Python."""
        return self.function(*arguments)


def inner(function: FunctionT) -> FunctionT:
    """Decorator of functions that only other compiled functions call."""
    return cast(FunctionT, Inner(function))
