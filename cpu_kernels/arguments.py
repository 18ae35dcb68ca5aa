"""The arguments of kernels by name: the integers that an operation's record holds from Op.ARGUMENTS on.

A kernel declares a subclass of Arguments, with a field for each integer, in the order of the record, described beside
it. Programs are recorded with an instance, and the kernel reads the record by the field's index (indices_of).
"""

from collections import namedtuple
from dataclasses import dataclass, fields
from functools import cache
from typing import TypeVar, cast, dataclass_transform

from cpu_kernels.records import Op

A = TypeVar("A", bound="Arguments")


@dataclass_transform(kw_only_default=True)
class Arguments:
    """The arguments of a kernel. Fields are given by name; each is an integer: an address, a count, bytes, a flag."""

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True, eq=False)(cls)
        if len(fields(cls)) > Op.SIZE - Op.ARGUMENTS:  # type: ignore[arg-type]
            raise TypeError(f"{cls.__name__} has more arguments than a record has room for")


@cache
def indices_of(arguments: type[A]) -> A:
    """The index of each argument under its name. Compiled code may use the result as constants."""
    names = [field.name for field in fields(arguments)]  # type: ignore[arg-type]
    return cast("A", namedtuple(arguments.__name__, names)(*range(len(names))))
