"""An open GGUF model: one file or all parts of a split one, whose tensors are read on demand.

Nothing is memory-mapped: truncating a mapped file kills its reader by a signal. Everything is read into buffers, and a
file that was changed or truncated while it was open is an error; renaming or deleting it is harmless.
"""

import hashlib
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gguf_io.blocks import dequantize
from gguf_io.errors import DAMAGED, ModelFileError, shortened
from gguf_io.header import Header, TensorInfo, read_header
from gguf_io.layouts import StandardFile, translate
from gguf_io.metadata import Metadata
from gguf_io.system import NotRegularError, open_regular, read_at, will_read
from gguf_io.wrong_files import described_file, described_folder

__all__ = ["FileState", "ModelFile", "TensorInfo", "TensorRows", "open_model"]

MAX_NAME = 80
MAX_PARTS = 512  # each holds a file descriptor
_MIN_FILE_BYTES = 24  # magic, version and the two counts
_SAMPLES_PER_TENSOR = 4
_SAMPLE_BYTES = 1024
_LARGE_BYTES, _AHEAD_BYTES = 1 << 20, 8 << 20  # after a large read, the system is asked to read ahead
SLACK_BYTES = 64  # padding that a buffer needs after the rows, for kernels that load whole vectors
LOOKED_UP = "per_layer_token_embd.weight"
"""A table that is most of some files, though a token needs one row of it: it is read by row and never loaded."""
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


def open_model(path: str | Path) -> "ModelFile":
    """Opens a model and reads its header; tensors are read on demand.

    path: a .gguf file, or any part of a split one (name-00001-of-00003.gguf), whose other parts are in the same folder.
    Raises ModelFileError naming the file and the field if anything is missing, damaged, hostile or not GGUF.
    """
    parts: list[_Part] = []
    try:
        parts.append(_Part(Path(path), 0))
        if (count := parts[0].header.metadata.get_int("split.count", 1, maximum=MAX_PARTS)) > 1:
            parts.pop().close()
            for number, part_path in enumerate(_part_paths(Path(path), count)):
                parts.append(_Part(part_path, number))
            _check_split(parts)
        return ModelFile(parts)
    except BaseException:
        for part in parts:
            part.close()
        raise


class ModelFile:
    """A model's header and tensors. Close it, or use it in a with statement; made by `open_model`.

    A file in another program's layout is presented in the standard one (gguf_io/layouts); `notes` says so.

    Reading from several threads is safe; close it when all of them are done. Reads raise ModelFileError if the file was
    changed since it was opened, or the system cannot read it.
    """

    def __init__(self, parts: "list[_Part]") -> None:
        self._parts = parts
        header = parts[0].header
        self.path: Path = parts[0].path
        self.paths: tuple[Path, ...] = tuple(part.path for part in parts)
        self.states: tuple[FileState, ...] = tuple(part.state for part in parts)
        self.version: int = header.version
        self.alignment: int = header.alignment
        tensors: dict[str, TensorInfo] = {}
        for part in parts:
            for tensor in part.header.tensors:
                if tensor.name in tensors:
                    raise ModelFileError(
                        f"{self.path}: tensors: {tensor.name} occurs in more than one part. Download the parts again."
                    )
                tensors[tensor.name] = tensor
        self._layout = translate(self.path, header, tensors)
        self.metadata: Metadata = self._layout.metadata if self._layout else header.metadata
        self.tensors: Mapping[str, TensorInfo] = self._layout.tensors if self._layout else MappingProxyType(tensors)
        self.notes: tuple[str, ...] = tuple(self._layout.notes()) if self._layout else ()
        self.weights_bytes: int = sum(tensor.nbytes for tensor in self.tensors.values())
        self.derived: dict[object, Any] = {}
        """What others have derived from the header and keep with the file, by keys of their own, until it is closed."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(state.size for state in self.states)

    @property
    def parameter_count(self) -> int:
        """Values of all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the tensors that take memory when the model is loaded: all but the LOOKED_UP table."""
        table = self.tensors.get(LOOKED_UP)
        return self.weights_bytes - (table.nbytes if table else 0)

    @cached_property
    def architecture(self) -> str:
        """`general.architecture`. Raises ModelFileError if it is missing or absurdly long."""
        name = self.metadata.get_str("general.architecture")
        if len(name) > MAX_NAME:
            raise ModelFileError(
                f"{self.path}: general.architecture: {shortened(name)!r} is too long a name. {DAMAGED}"
            )
        return name

    @property
    def name(self) -> str:
        """`general.name`, or the file's name without its suffix."""
        return self.metadata.get_str("general.name", self.path.stem)

    def data(
        self, name: str, first: int = 0, count: int | None = None, into: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Rows of a tensor as stored in the file: uint8, shape (count, row_bytes), all rows by default.

        Rows are those of all dimensions but the innermost. into: a buffer for them, SLACK_BYTES longer than they are;
        None makes a new one. KeyError for a name that the file does not have.
        """
        tensor = self.tensors[name]
        rows = prod(tensor.shape[:-1])
        row_bytes = tensor.nbytes // rows
        count = rows - first if count is None else count
        if not 0 <= first <= first + count <= rows:
            raise IndexError(f"{name} has {rows} rows, not {first}..{first + count}")
        if into is None:
            into = np.empty(count * row_bytes + SLACK_BYTES, np.uint8)
        wanted = into[: count * row_bytes]
        self._open_parts()[tensor.part].read_into(wanted.data, tensor.offset + first * row_bytes)
        return wanted.reshape(count, row_bytes)

    def rows(self, name: str) -> "TensorRows":
        """A reader of a tensor's rows that outlives a closed model. KeyError for an unknown name."""
        tensor = self.tensors[name]
        return TensorRows(self._open_parts()[tensor.part], tensor)

    def standard_file(self) -> StandardFile | None:
        """The model as a file in the standard layout; None if its own files are in that layout already."""
        if self._layout is None:
            return None
        parts = self._open_parts()

        def read_tensor(tensor: TensorInfo, start: int, target: memoryview) -> None:
            parts[tensor.part].read_into(target, tensor.offset + start)

        return StandardFile(self._layout, self.alignment, parts[0].read, read_tensor)

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """The tensor's values as a new float32 array of its shape."""
        tensor = self.tensors[name]
        return dequantize(self.data(name), tensor.type).reshape(tensor.shape)

    def identity(self) -> str:
        """64 hex digits that tell models apart for people and in listings, computed in milliseconds.

        SHA-256 over the parts' sizes, their headers, samples of every tensor, and how a layout was translated. Two
        files may differ elsewhere: where they must never be confused, use a digest of the whole file.
        """
        digest = hashlib.sha256(self._layout.changes() if self._layout else b"")
        for part in self._open_parts():
            digest.update(part.size.to_bytes(8, "little"))
            digest.update(part.read(0, part.header.nbytes))
            for tensor in part.header.tensors:
                length = min(tensor.nbytes, _SAMPLE_BYTES)
                for sample in range(_SAMPLES_PER_TENSOR):
                    start = tensor.offset + (tensor.nbytes - length) * sample // (_SAMPLES_PER_TENSOR - 1)
                    digest.update(part.read(start, start + length))
        return digest.hexdigest()

    def close(self) -> None:
        """Closes all parts. Closing twice is fine."""
        for part in self._parts:
            part.close()
        self._parts = []
        self.derived.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open_parts(self) -> "list[_Part]":
        if not self._parts:
            raise ValueError(f"{self.path} is closed")
        return self._parts


class TensorRows:
    """Rows of a tensor, read on demand. It keeps the file open until it is closed itself."""

    def __init__(self, part: "_Part", tensor: TensorInfo) -> None:
        self._file = part.duplicate()
        self._close = weakref.finalize(self, os.close, self._file.fd)
        self._offset, self._count = tensor.offset, prod(tensor.shape[:-1])
        self.row_bytes: int = tensor.type.row_bytes(tensor.shape[-1])

    def read(self, rows: Sequence[int]) -> NDArray[np.uint8]:
        """The rows with these indices as stored in the file: uint8[len(rows), row_bytes].

        Raises IndexError for an index out of range, ModelFileError as ModelFile does.
        """
        found = np.empty((len(rows), self.row_bytes), np.uint8)
        target = found.reshape(-1).data
        for i, row in enumerate(rows):
            if not 0 <= row < self._count:
                raise IndexError(f"there are {self._count} rows, and no row {row}")
            begin = i * self.row_bytes
            self._file.read_into(target[begin : begin + self.row_bytes], self._offset + row * self.row_bytes)
        return found

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._close()


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's state when it was opened: equal states mean equal content.

    changed_ns also reveals writers that set modified_ns back.
    """

    path: Path
    size: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, fd: int) -> "FileState":
        """The state of an open file. path: the one it was opened with."""
        state = os.fstat(fd)
        return cls(path.absolute(), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)

    @classmethod
    def now(cls, path: Path) -> "FileState":
        """The present state of the file at a path. Raises OSError."""
        fd = open_regular(path)  # for Windows, where os.stat has the time of creation and os.fstat that of the change
        try:
            return cls.of(path, fd)
        finally:
            os.close(fd)

    @property
    def stamp(self) -> tuple[int, int, int, int]:
        """All but the path."""
        return self.size, self.modified_ns, self.changed_ns, self.inode


class _Part:
    """One file of a model: open, its header parsed."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.fd = _opened(path)
        try:
            self.state = FileState.of(path, self.fd)
            self.size = self.state.size
            if self.size < _MIN_FILE_BYTES:
                start = self.read(0, self.size)
                if start.startswith(b"GGUF"):
                    raise ModelFileError(f"{path}: ends after {self.size} bytes. {DAMAGED}")
                raise ModelFileError(f"{path}: not a GGUF file: {described_file(start)}")
            self.header: Header = read_header(self.read, self.size, path, number)
        except BaseException:
            os.close(self.fd)
            raise

    def duplicate(self) -> "_Part":
        """The same file with a descriptor of its own, which the caller closes."""
        twin = copy(self)
        twin.fd = os.dup(self.fd)
        return twin

    def read(self, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        self.read_into(memoryview(data), start)
        return bytes(data)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from an offset on. After a large read, the system prefetches what follows."""
        try:
            done = read_at(self.fd, target, offset)
            if done >= _LARGE_BYTES:
                will_read(self.fd, offset + done, _AHEAD_BYTES)
        except OSError as error:
            raise ModelFileError(
                f"{self.path}: cannot be read at byte {offset}: {error.strerror}. Check the disk."
            ) from error
        state = os.fstat(self.fd)
        if done < len(target) or (state.st_size, state.st_mtime_ns) != (self.size, self.state.modified_ns):
            raise ModelFileError(f"{self.path}: the file was changed while it was open. Load the model again.")

    def close(self) -> None:
        os.close(self.fd)


def _opened(path: Path) -> int:
    try:
        return open_regular(path)
    except NotRegularError as error:
        is_folder = os.path.isdir(path)
        what = described_folder(path) if is_folder else "is not a regular file. Choose a .gguf model."
        raise ModelFileError(f"{path}: {what}") from error
    except (OSError, ValueError) as error:  # ValueError: a nul in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelFileError(f"{path}: cannot be opened: {reason}. Check the path.") from error


def _part_paths(path: Path, count: int) -> list[Path]:
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelFileError(
            f"{path}: split.count: the model has {count} parts, and their names must be like "
            f"{path.stem}-00001-of-{count:05}.gguf. Give the files their original names."
        )
    return [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}{match['suffix']}") for number in range(1, count + 1)
    ]


def _check_split(parts: "list[_Part]") -> None:
    for number, part in enumerate(parts):
        metadata = part.header.metadata
        metadata.get_int("split.count", minimum=len(parts), maximum=len(parts))
        metadata.get_int("split.no", minimum=number, maximum=number)
    total = sum(len(part.header.tensors) for part in parts)
    parts[0].header.metadata.get_int("split.tensors.count", total, minimum=total, maximum=total)
