"""Reads the header of one GGUF file, and checks every number before using it.

Format: ggml/docs/gguf.md. Versions 2 and 3, little-endian. The caps below are far above what any real model has; they
bound the work that a hostile file can cause. Python's integers do not overflow, so every product is exact.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from gguf_io.blocks import BLOCK_TYPES, BlockType
from gguf_io.errors import DAMAGED, ModelFileError, shortened
from gguf_io.metadata import Metadata, MetadataArray, Value
from gguf_io.wrong_files import EXAMINED_BYTES, described_file

MAX_HEADER_BYTES = 1 << 27
READ_AT_ONCE = 1 << 18
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 1024  # the format allows 65535, real keys have under 100
MAX_TENSOR_NAME_BYTES = 64  # the format's own
MAX_STRING_BYTES = 1 << 26  # the longest known strings hold a whole tokenizer.json, some 30 MiB
MAX_ARRAY_ITEMS = 1 << 22
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32
SUPPORTED_VERSIONS = (2, 3)

_STRING, _ARRAY = 8, 9
# Value types that are one number, as struct codes: ids 0 to 7 are uint8 int8 uint16 int16 uint32 int32 float32 bool,
# 10 to 12 uint64 int64 float64.
SCALAR_CODES = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_SCALARS = {type_id: struct.Struct(f"<{code}") for type_id, code in SCALAR_CODES.items()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SHAPES = {dimensions: struct.Struct(f"<{dimensions}Q") for dimensions in range(1, MAX_DIMENSIONS + 1)}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is stored and how to read it.

    shape: NumPy order, outermost first; the innermost is the row length in values. offset: bytes from the beginning
    of the file numbered `part`. nbytes: its size in that file.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int
    nbytes: int
    part: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything in one file before the tensor data.

    encoded: by key, the byte range (start, stop) of its value in the file, type included. nbytes: length of the header
    without the padding that follows it.
    """

    version: int
    alignment: int
    metadata: Metadata
    encoded: Mapping[str, tuple[int, int]]
    tensors: tuple[TensorInfo, ...]
    nbytes: int


def read_header(read: Callable[[int, int], bytes], size: int, path: Path, part: int = 0) -> Header:
    """Parses the header of a file of `size` bytes. read(start, stop) returns a range of them.

    Raises ModelFileError naming path and field; passes on what `read` raises.
    """
    return _HeaderReader(read, size, path, part).read()


class _HeaderReader:
    """buffer: the beginning of the file, as far as it has been read."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, path: Path, part: int) -> None:
        self.read_range = read
        self.buffer = bytearray()
        self.path = path
        self.part = part
        self.size = size
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.position = 0

    def fill(self, stop: int) -> None:
        """Read until the buffer holds the first `stop` bytes; `stop` is at most `self.end`."""
        while len(self.buffer) < stop:
            have = len(self.buffer)
            self.buffer += self.read_range(have, min(max(stop, have + READ_AT_ONCE), self.end))

    def read(self) -> Header:
        version = self.read_version()
        tensor_count = self.count("tensor count", MAX_TENSORS)
        key_count = self.count("key count", MAX_KEYS)
        values: dict[str, Value] = {}
        encoded: dict[str, tuple[int, int]] = {}
        for index in range(key_count):
            key = self.identifier(f"key {index}", MAX_KEY_BYTES)
            if key in values:
                self.fail(key, "occurs twice")
            start = self.position
            values[key] = self.value(key)
            encoded[key] = start, self.position
        metadata = Metadata(self.path, values)
        alignment = self.check_alignment(metadata)
        tensors: dict[str, TensorInfo] = {}
        for index in range(tensor_count):
            tensor = self.tensor(index)
            if tensor.name in tensors:
                self.fail(f"tensor {tensor.name!r}", "occurs twice")
            tensors[tensor.name] = tensor
        placed = self.place(list(tensors.values()), alignment)
        return Header(version, alignment, metadata, encoded, placed, self.position)

    def read_version(self) -> int:
        self.fill(min(4, self.end))
        magic = bytes(self.buffer[:4])
        if magic != b"GGUF":
            self.fill(min(EXAMINED_BYTES, self.end))
            raise ModelFileError(f"{self.path}: not a GGUF file: {described_file(bytes(self.buffer[:EXAMINED_BYTES]))}")
        self.position = 4
        version: int = self.number(_U32, "version")
        if version and version & 0xFFFF == 0:
            self.fail("version", "the file is big-endian", "Use the little-endian version of the model.")
        if version not in SUPPORTED_VERSIONS:
            self.fail("version", f"GGUF {version} is not supported, only 2 and 3 are", "Convert the model again.")
        return version

    def value(self, key: str) -> Value:
        type_id = self.number(_U32, f"{key} (type)")
        if type_id in _SCALARS:
            value: Value = self.number(_SCALARS[type_id], key)
            return value
        if type_id == _STRING:
            return self.string(key, MAX_STRING_BYTES)
        if type_id != _ARRAY:
            self.fail(key, f"has the unknown value type {type_id}")
        return self.array(key)

    def array(self, key: str) -> MetadataArray:
        type_id = self.number(_U32, f"{key} (item type)")
        if type_id == _ARRAY:
            # llama.cpp refuses these as well, so no usable model has one.
            self.fail(key, "is an array of arrays, which no model needs")
        count = self.count(f"{key} (length)", MAX_ARRAY_ITEMS)
        start = self.position
        if type_id in _SCALARS:
            item = _SCALARS[type_id]
            self.skip(count * item.size, key)
            code = item.format[1:]
        elif type_id == _STRING:
            self.skip_strings(key, count)
            code = "s"
        else:
            self.fail(key, f"has the unknown item type {type_id}")
        return MetadataArray(bytes(self.buffer[start : self.position]), count, code, f"{self.path}: {key}")

    def skip_strings(self, key: str, count: int) -> None:
        # The only loop that runs for every token of a vocabulary, so it calls nothing but unpack.
        buffer, length_at, position = self.buffer, _U64.unpack_from, self.position
        last_length, filled = self.end - 8, len(self.buffer) - 8
        for index in range(count):
            if position > filled:
                if position > last_length:
                    self.past_end(f"{key}[{index}]")
                self.fill(position + 8)
                filled = len(buffer) - 8
            (length,) = length_at(buffer, position)
            if length > MAX_STRING_BYTES:
                self.fail(f"{key}[{index}]", f"has {length} bytes, more than the limit of {MAX_STRING_BYTES}")
            position += 8 + length
        if position > self.end:
            self.past_end(key)
        self.fill(position)
        self.position = position

    def tensor(self, index: int) -> TensorInfo:
        """One entry of the tensor table, its offset still relative to the data section."""
        name = self.identifier(f"tensor {index} (name)", MAX_TENSOR_NAME_BYTES)
        field = f"tensor {name!r}"
        dimensions = self.number(_U32, f"{field} (dimensions)")
        if dimensions not in _SHAPES:
            self.fail(field, f"has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = _SHAPES[dimensions].unpack_from(self.buffer, self.skip(8 * dimensions, f"{field} (shape)"))[::-1]
        if 0 in shape:
            self.fail(field, f"has an empty dimension: {shape}")
        type_id = self.number(_U32, f"{field} (type)")
        block_type = BLOCK_TYPES.get(type_id)
        if block_type is None:
            self.fail(field, f"has the block type {type_id}, which is unknown or was withdrawn from the format")
        if shape[-1] % block_type.items:
            self.fail(field, f"has rows of {shape[-1]} values, no multiple of {block_type.name}'s {block_type.items}")
        nbytes = prod(shape) // block_type.items * block_type.bytes
        offset = self.number(_U64, f"{field} (offset)")
        return TensorInfo(name, shape, block_type, offset, nbytes, self.part)

    def place(self, tensors: list[TensorInfo], alignment: int) -> tuple[TensorInfo, ...]:
        """The same tensors with offsets from the beginning of the file, aligned, disjoint and inside it."""
        data_start = -(-self.position // alignment) * alignment
        placed = []
        for tensor in tensors:
            field = f"tensor {tensor.name!r}"
            if tensor.offset % alignment:
                self.fail(field, f"starts at offset {tensor.offset}, which is not aligned to {alignment}")
            offset = data_start + tensor.offset
            if offset + tensor.nbytes > self.size:
                self.fail(field, f"ends at byte {offset + tensor.nbytes} and the file has {self.size}")
            placed.append(replace(tensor, offset=offset))
        by_offset = sorted(placed, key=attrgetter("offset"))
        for before, after in pairwise(by_offset):
            if before.offset + before.nbytes > after.offset:
                self.fail(f"tensor {after.name!r}", f"overlaps tensor {before.name!r}")
        return tuple(placed)

    def check_alignment(self, metadata: Metadata) -> int:
        alignment = metadata.get_int("general.alignment", DEFAULT_ALIGNMENT)
        if alignment < 8 or alignment > MAX_ALIGNMENT or alignment & (alignment - 1):
            self.fail("general.alignment", f"is {alignment}, not a power of two from 8 to {MAX_ALIGNMENT}")
        return alignment

    def number(self, layout: struct.Struct, field: str) -> Any:
        """A number of the type that `layout` has."""
        return layout.unpack_from(self.buffer, self.skip(layout.size, field))[0]

    def count(self, field: str, cap: int) -> int:
        """A count of items that each take at least one byte of the rest of the header."""
        count: int = self.number(_U64, field)
        if count > cap:
            self.fail(field, f"is {count}, above the limit of {cap}")
        if count > self.end - self.position:
            self.past_end(field)
        return count

    def string(self, field: str, cap: int) -> str:
        length = self.number(_U64, f"{field} (length)")
        if length > cap:
            self.fail(field, f"has {length} bytes, more than the limit of {cap}")
        start = self.skip(length, field)
        try:
            return self.buffer[start : self.position].decode()
        except UnicodeDecodeError as error:
            self.fail(field, f"is not UTF-8 text ({error.reason})")

    def identifier(self, field: str, cap: int) -> str:
        """A key or a tensor's name: printable, so that neither C nor a terminal reads it as something else."""
        name = self.string(field, cap)
        if not name or not name.isprintable():
            self.fail(field, f"is {shortened(name, 40)!r}, not a printable name")
        return name

    def skip(self, nbytes: int, field: str) -> int:
        """Read this many bytes; return where they begin."""
        start, stop = self.position, self.position + nbytes
        if stop > self.end:
            self.past_end(field)
        if stop > len(self.buffer):
            self.fill(stop)
        self.position = stop
        return start

    def past_end(self, field: str) -> NoReturn:
        if self.end < self.size:
            self.fail(field, f"exceeds the limit of {MAX_HEADER_BYTES} bytes for a header")
        self.fail(field, f"runs past the end of the file ({self.size} bytes)")

    def fail(self, field: str, problem: str, advice: str = DAMAGED) -> NoReturn:
        raise ModelFileError(f"{self.path}: {field}: {problem}. {advice}")
