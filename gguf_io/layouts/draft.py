"""A header while rules rewrite it: its keys and tensors, and the few operations that the rules need."""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from gguf_io.errors import DAMAGED, ModelFileError
from gguf_io.header import SCALAR_CODES, Header, TensorInfo
from gguf_io.metadata import MetadataArray, Scalar, Value

ARCHITECTURE = "general.architecture"
_STRING, _ARRAY = 8, 9
_TYPE_IDS = {code: type_id for type_id, code in SCALAR_CODES.items()} | {"s": _STRING}
_MOST = 2**31 - 1
_VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")


class HeaderDraft:
    """Starts as a copy of the header.

    values: by key. encoded: by key, the bytes of its value, type included, or their range (start, stop) in the first
    file. left_out: tensors that a text model does not use.
    """

    def __init__(self, path: Path, header: Header, tensors: Mapping[str, TensorInfo]) -> None:
        self._path = path
        self.values: dict[str, Value] = dict(header.metadata)
        self.encoded: dict[str, bytes | tuple[int, int]] = dict(header.encoded)
        self.tensors = dict(tensors)
        self.left_out: list[TensorInfo] = []

    @property
    def architecture(self) -> str:
        """The name that keys begin with; empty if the file gives none."""
        return self.text(ARCHITECTURE) or ""

    def error(self, key: str, problem: str) -> ModelFileError:
        """An error about a key, for the caller to raise."""
        return ModelFileError(f"{self._path}: {key}: {problem}. {DAMAGED}")

    def key(self, key: str) -> str:
        """The full key: one that begins with a dot is prefixed with the architecture."""
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def has(self, *keys: str) -> bool:
        """Whether one of the keys exists."""
        return any(self.key(key) in self.values for key in keys)

    def text(self, key: str) -> str | None:
        """A string, None if the key is missing or not text."""
        value = self.values.get(self.key(key))
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """An integer from 0 to 2^31 - 1, None if the key is missing or has another value."""
        value = self.values.get(self.key(key))
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST else None

    def numbers(self, key: str) -> list[int]:
        """An array of such integers, empty if the key is missing or has another value."""
        value = self.values.get(self.key(key))
        if not isinstance(value, MetadataArray) or value.code in "fd?s":
            return []
        items = [int(item) for item in value]
        return items if all(0 <= item <= _MOST for item in items) else []

    def set(self, key: str, code: str, value: Scalar | Sequence[int]) -> None:
        """Set a key to a value of the type `code`: a struct code ("I" for uint32, "f" for float32), "s" for text."""
        key = self.key(key)
        if not isinstance(value, str | int | float):
            self._put(key, code, MetadataArray.of(value, code, f"{self._path}: {key}"))
        else:
            self._put(key, code, struct.unpack("<f", struct.pack("<f", value))[0] if code == "f" else value)

    def _put(self, key: str, code: str, value: Value) -> None:
        self.values[key] = value
        self.encoded[key] = _encoded(code, value)

    def default(self, key: str, code: str, value: Scalar | Sequence[int]) -> None:
        """Set a key if it is missing."""
        if not self.has(key):
            self.set(key, code, value)

    def copy(self, source: str, target: str) -> None:
        """Give the target the source's value, if there is one and the target has none."""
        source, target = self.key(source), self.key(target)
        if source in self.values and target not in self.values:
            self.values[target] = self.values[source]
            self.encoded[target] = self.encoded[source]

    def drop(self, *keys: str) -> None:
        """Remove keys."""
        for key in map(self.key, keys):
            self.values.pop(key, None)
            self.encoded.pop(key, None)

    def become(self, architecture: str) -> None:
        """Change the architecture: its name, and the keys that begin with it."""
        old = self.architecture
        for key in [key for key in self.values if key.startswith(f"{old}.")]:
            self.copy(key, f"{architecture}.{key.removeprefix(f'{old}.')}")
            self.drop(key)
        self.set(ARCHITECTURE, "s", architecture)

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """A tensor's shape, outermost first; None if there is no such tensor."""
        found = self.tensors.get(tensor)
        return None if found is None else found.shape

    def any_tensor(self, *beginnings: str) -> bool:
        """Whether any tensor's name begins with one of `beginnings`."""
        return any(name.startswith(beginnings) for name in self.tensors)

    def rename(self, renamed: Mapping[str, str]) -> None:
        """Rename tensors. renamed: by regular expression, what replaces its match.

        The first pattern that matches applies. A tensor keeps its name if the new one is taken.
        """
        for old in list(self.tensors):
            pattern = next((pattern for pattern in renamed if re.search(pattern, old)), None)
            new = old if pattern is None else re.sub(pattern, renamed[pattern], old, count=1)
            if new not in self.tensors:
                self.tensors[new] = replace(self.tensors.pop(old), name=new)

    def leave_out(self, *beginnings: str) -> None:
        """Move the tensors whose names begin with one of `beginnings` to `left_out`."""
        for name in [name for name in self.tensors if name.startswith(beginnings)]:
            self.left_out.append(self.tensors.pop(name))

    def cut_rows(self, tensor: str, rows: int) -> None:
        """Keep the first `rows` rows of a matrix."""
        found = self.tensors.get(tensor)
        if found is not None and len(found.shape) == 2 and 0 < rows < found.shape[0]:
            shape = (rows, found.shape[1])
            nbytes = prod(shape[:-1]) * found.type.row_bytes(shape[-1])
            self.tensors[tensor] = replace(found, shape=shape, nbytes=nbytes)

    def cut_vocabulary(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of the vocabulary."""
        for key in _VOCABULARY:
            value = self.values.get(key)
            if isinstance(value, MetadataArray) and len(value) > tokens > 0:
                self._put(key, value.code, value.head(tokens))

    def tokens(self) -> Sequence[Scalar]:
        """The texts of the vocabulary's tokens, empty if there are none."""
        tokens = self.values.get(_VOCABULARY[0])
        return tokens if isinstance(tokens, MetadataArray) else ()


def _encoded(code: str, value: Value) -> bytes:
    """A value as a header stores it: its type id, then the value."""
    if isinstance(value, MetadataArray):
        return struct.pack("<IIQ", _ARRAY, _TYPE_IDS[code], len(value)) + value.raw
    if isinstance(value, str):
        data = value.encode()
        return struct.pack("<IQ", _STRING, len(data)) + data
    return struct.pack(f"<I{code}", _TYPE_IDS[code], value)
