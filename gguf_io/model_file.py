"""An open GGUF model: one file or all parts of a split one, memory-mapped, read lazily.

The mapping shows the file as it is now. A file that is truncated under a mapping kills its reader (SIGBUS) and one
that is overwritten gives other bytes, so every access first asks the open file whether it is still the same one;
renaming or deleting it is harmless. Copy what you keep: see `dequantize` and `release`.
"""

import contextlib
import hashlib
import mmap
import os
import re
import stat
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gguf_io.blocks import dequantize
from gguf_io.errors import ModelFileError
from gguf_io.header import Header, TensorInfo, read_header
from gguf_io.metadata import Metadata

__all__ = ["ModelFile", "TensorInfo", "open_model"]

MAX_PARTS = 512  # each holds two file descriptors
_MIN_FILE_BYTES = 24  # magic, version and the two counts
_SAMPLES_PER_TENSOR = 4
_SAMPLE_BYTES = 1024
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def open_model(path: str | Path) -> "ModelFile":
    """Opens a model and reads its header; tensors are read when asked for.

    path: a .gguf file, or any part of a split one (name-00001-of-00003.gguf), whose other parts lie beside it.
    Raises ModelFileError naming the file and the field for whatever is missing, damaged, hostile or of another kind.
    """
    parts: list[_Part] = []
    try:
        parts.append(_Part(Path(path), 0))
        if (count := parts[0].split_count()) > 1:
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

    Reading from several threads is safe; closing is for one of them, when the others are done.
    """

    def __init__(self, parts: "list[_Part]") -> None:
        self._parts = parts
        header = parts[0].header
        self.path: Path = parts[0].path
        self.paths: tuple[Path, ...] = tuple(part.path for part in parts)
        self.version: int = header.version
        self.alignment: int = header.alignment
        self.metadata: Metadata = header.metadata
        tensors = [tensor for part in parts for tensor in part.header.tensors]
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({tensor.name: tensor for tensor in tensors})
        if len(self.tensors) != len(tensors):
            raise ModelFileError(
                f"{self.path}: tensors: a name occurs in more than one part. Download the parts again."
            )
        self.size_bytes: int = sum(part.size for part in parts)
        self.parameter_count: int = sum(prod(tensor.shape) for tensor in tensors)

    @property
    def architecture(self) -> str:
        """`general.architecture`; ModelFileError where it is missing."""
        return self.metadata.get_str("general.architecture")

    @property
    def name(self) -> str:
        """`general.name`, or the file's name without its suffix."""
        return self.metadata.get_str("general.name", self.path.stem)

    def data(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as they lie in the file: a read-only view, uint8, shape (rows, row_bytes).

        rows is the product of all dimensions but the innermost. The view stays valid after `close`, but not after
        the file is truncated or overwritten: do not keep it. KeyError for a name that the file does not have.
        """
        tensor = self.tensors[name]
        part = self._part(tensor)
        row_bytes = tensor.type.row_bytes(tensor.shape[-1])
        flat = np.frombuffer(part.mapping, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(-1, row_bytes)

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """The tensor's values as a new float32 array of its shape, which needs the file no longer."""
        tensor = self.tensors[name]
        return dequantize(self.data(name), tensor.type).reshape(tensor.shape)

    def release(self, name: str) -> None:
        """Gives the tensor's pages back to the system. Views stay valid; touching them reads the file again."""
        tensor = self.tensors[name]
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._part(tensor).mapping.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.nbytes - start)

    def release_all(self) -> None:
        """Gives the pages of all tensors back to the system."""
        for part in self._open_parts():
            part.mapping.madvise(mmap.MADV_DONTNEED)

    def identity(self) -> str:
        """64 hex digits that name the content, for cache keys; a copy or a renamed file keeps its identity.

        SHA-256 over the parts' sizes, their whole headers, and samples of every tensor: it tells models apart, but is
        no proof against a forger. Costs milliseconds when the file is in memory.
        """
        digest = hashlib.sha256()
        for part in self._open_parts():
            part.check_unchanged()
            digest.update(part.size.to_bytes(8, "little"))
            digest.update(part.mapping[: part.header.nbytes])
            for tensor in part.header.tensors:
                length = min(tensor.nbytes, _SAMPLE_BYTES)
                for sample in range(_SAMPLES_PER_TENSOR):
                    start = tensor.offset + (tensor.nbytes - length) * sample // (_SAMPLES_PER_TENSOR - 1)
                    digest.update(part.mapping[start : start + length])
        return digest.hexdigest()

    def close(self) -> None:
        """Closes all parts. A mapping that views still use is freed with the last of them. Closing twice is fine."""
        for part in self._parts:
            part.close()
        self._parts = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _part(self, tensor: TensorInfo) -> "_Part":
        part = self._open_parts()[tensor.part]
        part.check_unchanged()
        return part

    def _open_parts(self) -> "list[_Part]":
        if not self._parts:
            raise ValueError(f"{self.path} is closed")
        return self._parts


class _Part:
    """One file of a model: open, mapped, its header parsed."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.fd = _open_regular(path)
        try:
            state = os.fstat(self.fd)
            self.size = state.st_size
            self.modified_ns = state.st_mtime_ns
            if self.size < _MIN_FILE_BYTES:
                raise ModelFileError(f"{path}: is not a GGUF file: it has {self.size} bytes. Choose a .gguf model.")
            self.mapping = mmap.mmap(self.fd, self.size, access=mmap.ACCESS_READ)
            self.header: Header = read_header(self.mapping, path, number)
        except BaseException:
            os.close(self.fd)
            raise

    def split_count(self) -> int:
        return self.header.metadata.get_int("split.count", 1, maximum=MAX_PARTS)

    def check_unchanged(self) -> None:
        state = os.fstat(self.fd)
        if (state.st_size, state.st_mtime_ns) != (self.size, self.modified_ns):
            raise ModelFileError(f"{self.path}: the file was changed while it was open. Load the model again.")

    def close(self) -> None:
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # views exist; the mapping goes with the last of them
            self.mapping.close()


def _open_regular(path: Path) -> int:
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a nul in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelFileError(f"{path}: cannot be opened: {reason}. Check the path.") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ModelFileError(f"{path}: is not a regular file. Choose a .gguf model.")
    return fd


def _part_paths(path: Path, count: int) -> list[Path]:
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelFileError(
            f"{path}: split.count: the model has {count} parts, and their names must be like "
            f"{path.stem}-00001-of-{count:05}.gguf. Give the files their original names."
        )
    return [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def _check_split(parts: "list[_Part]") -> None:
    for number, part in enumerate(parts):
        metadata = part.header.metadata
        metadata.get_int("split.count", minimum=len(parts), maximum=len(parts))
        metadata.get_int("split.no", minimum=number, maximum=number)
    total = sum(len(part.header.tensors) for part in parts)
    parts[0].header.metadata.get_int("split.tensors.count", total, minimum=total, maximum=total)
