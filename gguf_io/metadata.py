"""The key-value section of a model file: lazy arrays, and getters that check what they return."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

from gguf_io.errors import DAMAGED, ModelFileError, shortened

Scalar = str | int | float | bool
ItemT = TypeVar("ItemT", str, int, float, bool)
NumberT = TypeVar("NumberT", int, float)
_LENGTH = struct.Struct("<Q")  # of a string, before its bytes


class MetadataArray(Sequence[Scalar]):
    """An array value that is decoded on first access; its length is known without decoding.

    It owns a copy of its bytes, so it stays valid when the file changes or is closed. raw: the items as a file stores
    them, one after another. code: their struct format, or "s" for strings, whose bounds the header reader has checked.
    """

    def __init__(self, raw: bytes, count: int, code: str, where: str) -> None:
        self.raw = raw
        self.code = code
        self._count = count
        self._where = where

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Scalar: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Scalar]: ...
    def __getitem__(self, index: int | slice) -> Scalar | Sequence[Scalar]:
        return self._items[index]

    def __iter__(self) -> Iterator[Scalar]:
        return iter(self._items)

    def __repr__(self) -> str:
        return f"<{self._count} items of {self._where}>"

    @classmethod
    def of(cls, items: Sequence[int | float | bool], code: str, where: str) -> "MetadataArray":
        """An array of these numbers."""
        return cls(struct.pack(f"<{len(items)}{code}", *items), len(items), code, where)

    def head(self, count: int) -> "MetadataArray":
        """The first `count` items, of at least as many."""
        stop = 0 if self.code == "s" else count * struct.calcsize(f"<{self.code}")
        if self.code == "s":
            for _ in range(count):
                stop += 8 + _LENGTH.unpack_from(self.raw, stop)[0]
        return MetadataArray(self.raw[:stop], count, self.code, self._where)

    @cached_property
    def _items(self) -> tuple[Scalar, ...]:
        if self.code != "s":
            return struct.unpack(f"<{self._count}{self.code}", self.raw)
        length_at = _LENGTH.unpack_from
        items: list[str] = []
        position = 0
        try:
            for _ in range(self._count):
                start = position + 8
                position = start + length_at(self.raw, position)[0]
                items.append(self.raw[start:position].decode())
        except UnicodeDecodeError as error:
            raise ModelFileError(
                f"{self._where}[{len(items)}]: is not UTF-8 text ({error.reason}). {DAMAGED}"
            ) from error
        return tuple(items)


Value = Scalar | MetadataArray


class Metadata(Mapping[str, Value]):
    """The header's values by key. The getters raise ModelFileError naming the file and the key.

    Without a default, a missing key is an error. A default replaces a missing key, never a bad value.
    """

    def __init__(self, path: Path, values: dict[str, Value]) -> None:
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def get_int(self, key: str, default: int | None = None, *, minimum: int = 0, maximum: int = 2**63 - 1) -> int:
        """An integer in minimum..maximum, both included."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._fail(key, f"must be an integer, not {_kind(value)}")
        return self._in_range(key, value, minimum, maximum)

    def get_float(
        self, key: str, default: float | None = None, *, minimum: float = -math.inf, maximum: float = math.inf
    ) -> float:
        """A finite number in minimum..maximum, both included; integers count as numbers."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(key, f"must be a number, not {_kind(value)}")
        if not math.isfinite(value):
            self._fail(key, f"is {value}, not a finite number")
        return float(self._in_range(key, value, minimum, maximum))

    def get_str(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            self._fail(key, f"must be a string, not {_kind(value)}")
        return value

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            self._fail(key, f"must be true or false, not {_kind(value)}")
        return value

    def get_list(self, key: str, item: type[ItemT], *, length: int | None = None) -> list[ItemT]:
        """An array whose items are all exactly of the type `item` (str, int, float or bool), of `length` if given.

        A missing key is an error; check `key in metadata` first if the array is optional.
        """
        value = self._value(key, None)
        if not isinstance(value, MetadataArray):
            self._fail(key, f"must be an array, not {_kind(value)}")
        if length is not None and len(value) != length:
            self._fail(key, f"must have {length} items, not {len(value)}")
        items: list[Any] = list(value)
        if wrong := set(map(type, items)) - {item}:
            entry = next(entry for entry in items if type(entry) in wrong)
            self._fail(key, f"must be an array of {item.__name__}, but contains {_kind(entry)}")
        return items

    def _value(self, key: str, default: Scalar | None) -> Value:
        value = self._values.get(key, default)
        if value is None:
            self._fail(key, "is missing")
        return value

    def _in_range(self, key: str, value: NumberT, minimum: NumberT, maximum: NumberT) -> NumberT:
        if not minimum <= value <= maximum:
            self._fail(key, f"is {value}, outside {minimum}..{maximum}")
        return value

    def _fail(self, key: str, problem: str) -> NoReturn:
        raise ModelFileError(f"{self._path}: {key}: {problem}. Convert the model again or use another version of it.")


def _kind(value: Value) -> str:
    return "an array" if isinstance(value, MetadataArray) else f"{type(value).__name__} ({shortened(value, 40)})"
