"""The arguments of kernels by name: the integers that an operation's record holds from Op.ARGUMENTS on.

A kernel declares a subclass of Arguments, with a field for each integer, in the order of the record, described beside
it. Integers that several kernels take together are a subclass too, and a field of theirs; the record holds its integers
in the field's place. Programs are recorded with an instance, and the kernel reads the record by the field's index
(indices_of).
"""

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from operator import index
from typing import Any, TypeVar, cast, dataclass_transform

from cpu_kernels.records import Op

A = TypeVar("A", bound="Arguments")


@dataclass_transform(kw_only_default=True)
class Arguments:
    """The arguments of a kernel. Fields are given by name; each is an integer: an address, a count, bytes, a flag.

    Or it is a group of them, which is Arguments too.
    """

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True, eq=False)(cls)
        numbers = count()
        _indices(cls, numbers)
        if next(numbers) > Op.SIZE - Op.ARGUMENTS:
            raise TypeError(f"{cls.__name__} has more arguments than a record has room for")


@cache
def indices_of(arguments: type[A]) -> A:
    """The index of each argument under its name. Compiled code may use the result as constants."""
    return cast("A", _indices(arguments, count()))


def integers_of(arguments: Arguments) -> list[int]:
    """The integers of a record in its order. Raises TypeError for a value that is none, or not the field's group."""
    found: list[int] = []
    for name, kind in _kinds(type(arguments)):
        value = getattr(arguments, name)
        if kind is not int and type(value) is kind:
            found += integers_of(value)
            continue
        try:
            if kind is not int:
                raise TypeError
            found.append(index(value))
        except TypeError:
            of, wanted = type(arguments).__name__, "an integer" if kind is int else kind.__name__
            raise TypeError(f"{of}: {name} must be {wanted}, not {type(value).__name__}") from None
    return found


def _kinds(arguments: type[Arguments]) -> list[tuple[str, Any]]:
    """The names of the fields, and for each one int or the class of the group."""
    return [(one.name, one.type) for one in fields(arguments)]  # type: ignore[arg-type]


def _indices(arguments: type[Arguments], numbers: Iterator[int]) -> Any:
    found = {name: next(numbers) if kind is int else _indices(kind, numbers) for name, kind in _kinds(arguments)}
    return namedtuple(arguments.__name__, found)(**found)
