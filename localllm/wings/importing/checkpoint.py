"""A folder of safetensors files, read within bounds: its configuration and its tensors.

Format: https://huggingface.co/docs/safetensors (8 bytes with the header's length, little-endian; a JSON object of
names, dtypes, shapes and offsets; the values). Read here and not by the safetensors library, because NumPy has neither
BF16 nor FP8. Links that lead out of the folder are followed only into the blobs of the Hugging Face cache.
"""

import json
import os
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_io.system import open_regular
from localllm.errors import reason
from localllm.files import decoded, listed
from localllm.text import shortened
from localllm.wings.importing.errors import CheckpointError

MAX_JSON_BYTES = 128 << 20  # tokenizer.json of large vocabularies has 30 MiB
MAX_HEADER_BYTES = 100 << 20
MAX_FILES, MAX_TENSORS, MAX_DIMENSIONS = 1024, 1 << 18, 6
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's values in a file. shape: in NumPy's order, rows second to last; start, stop: byte offsets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int

    @property
    def row_shape(self) -> tuple[int, int]:
        """Rows and values per row, with all dimensions but the last flattened."""
        return prod(self.shape[:-1]), (self.shape[-1] if self.shape else 1)

    def raw(self) -> NDArray[Any]:
        """The stored values, memory-mapped: BF16 as uint16, FP8 as uint8; rows x values of a row."""
        mapped = np.memmap(self.path, np.uint8, "r", self.start, (self.stop - self.start,))
        return np.asarray(mapped).view(_STORED[self.dtype]).reshape(self.row_shape)

    def floats(self, raw: NDArray[Any]) -> NDArray[np.float32]:
        """Stored values converted to floats."""
        if self.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        if self.dtype == "F8_E4M3":
            return np.asarray(_E4M3[raw], np.float32)
        if self.dtype == "F8_E5M2":  # the upper half of a float16
            return (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
        return raw.astype(np.float32)


_STORED: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "F64": np.float64,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}


def _e4m3() -> NDArray[np.float32]:
    """The values of FP8's codes with four bits of exponent: no infinities, and one NaN for each sign."""
    exponent, fraction = np.divmod(np.arange(128.0), 8)
    values = np.where(exponent == 0, fraction / 2**9, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    values[-1] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_E4M3 = _e4m3()


class CheckpointFolder:
    """A folder of small text files and safetensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stored(self, name: str) -> "list[StoredTensor]":
        """The tensors of a safetensors file, of which only the header is read. Raises CheckpointError."""
        return _read_header(checked(self.folder / name, self.folder))

    def json(self, name: str) -> dict[str, Any]:
        """A file's JSON object. Raises CheckpointError if the file is missing, too large or not an object."""
        found = self.optional_json(name)
        if found is None:
            raise CheckpointError(f"{self.folder}: there is no {name}. Use a folder in Hugging Face's format.")
        return found

    def optional_json(self, name: str) -> dict[str, Any] | None:
        """A file's JSON object; None if the file is missing. Raises CheckpointError."""
        text = self.optional_text(name)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.folder / name}: is not JSON: {shortened(str(error))}.") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.folder / name}: is not a JSON object. Download the folder again.")
        return value

    def optional_text(self, name: str) -> str | None:
        """A file's text; None if the file is missing. Raises CheckpointError."""
        path = self.folder / name
        if not os.path.isfile(path):
            return None
        try:
            with open(open_regular(checked(path, self.folder)), "rb") as file:
                data = file.read(min(path.stat().st_size, MAX_JSON_BYTES) + 1)  # read allocates this much at once
            if len(data) > MAX_JSON_BYTES:
                raise CheckpointError(f"{path}: has more than {MAX_JSON_BYTES >> 20} MiB.")
            return decoded(data)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {reason(error)}.") from error
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: is not UTF-8 text.") from error


class Checkpoint(CheckpointFolder):
    """A folder's configuration and tensors. config: of the text model, if the model has several parts."""

    def __init__(self, folder: Path) -> None:
        """Read only headers. Raises CheckpointError."""
        super().__init__(folder)
        self.whole_config = self.json("config.json")
        text = self.whole_config.get("text_config")
        self.config: dict[str, Any] = {**self.whole_config, **text} if isinstance(text, dict) else self.whole_config
        self.tensors: dict[str, StoredTensor] = {}
        for path in self._files():
            for tensor in _read_header(path):
                if tensor.name in self.tensors:
                    raise CheckpointError(f"{path}: the tensor {shortened(tensor.name)} is in another file too.")
                self.tensors[tensor.name] = tensor
        for number in (2, 3):  # the dense layers after pooling in models of sentence-transformers
            path = folder / f"{number}_Dense" / _SINGLE
            if os.path.isfile(path):
                self._add_dense(number, checked(path, folder))
        if not self.tensors:
            raise CheckpointError(f"{folder}: there are no tensors. Download the folder again.")

    @property
    def model_type(self) -> str:
        """The family's name: of the text model, if the model has several parts. Raises CheckpointError."""
        found = self.config.get("model_type")
        if not isinstance(found, str):
            raise CheckpointError(f"{self.folder / 'config.json'}: model_type is missing. Download the folder again.")
        return found

    def _add_dense(self, number: int, path: Path) -> None:
        stated = self.optional_json(f"{number}_Dense/config.json") or {}
        if "Identity" not in str(stated.get("activation_function", "Identity")):
            raise CheckpointError(f"{path.parent / 'config.json'}: has an activation; only Identity can be imported.")
        for tensor in _read_header(path):
            self.tensors[f"dense_{number}.{tensor.name}"] = replace(tensor, name=f"dense_{number}.{tensor.name}")

    def _files(self) -> list[Path]:
        """The safetensors files that the index names, or the only one."""
        index = self.optional_json(_INDEX)
        if index is None:
            names = {_SINGLE}
        else:
            weights = index.get("weight_map")
            if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
                raise CheckpointError(f"{self.folder / _INDEX}: has no weight_map. Download the folder again.")
            names = set(weights.values())
        if len(names) > MAX_FILES:
            raise CheckpointError(f"{self.folder / _INDEX}: names more than {MAX_FILES} files.")
        return [self._file(name) for name in sorted(names)]

    def _file(self, name: str) -> Path:
        path = self.folder / name
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{self.folder / _INDEX}: {shortened(name)!r} is not a safetensors file beside it.")
        if not os.path.isfile(path):
            stored = any(each.suffix.lower() == ".safetensors" for each in listed(self.folder))
            hint = "" if stored else " Files of other formats are not imported."
            raise CheckpointError(f"{path}: the file is missing. Download the folder again.{hint}")
        return checked(path, self.folder)


def checked(path: Path, folder: Path) -> Path:
    """The path, if it leads to a file in the folder, or to a blob of the Hugging Face cache that contains the folder.

    Raises CheckpointError.
    """
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (real.is_relative_to(home) or real.is_relative_to(cache)):
        raise CheckpointError(f"{path}: leads out of the folder, to {real}. Put the file itself there.")
    return path


def _read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a file, with their offsets checked against its size. Raises CheckpointError."""
    try:
        size = path.stat().st_size
        with open(open_regular(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path}: is not a complete safetensors file. Download it again.")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {reason(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not JSON: {shortened(str(error))}. Download it again.") from error
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise CheckpointError(f"{path}: its header is not a table of tensors. Download it again.")
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    return [_tensor(path, name, entry, 8 + length, size) for name, entry in entries]


def _tensor(path: Path, name: str, entry: Any, first: int, size: int) -> StoredTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: {shortened(name)}: its entry is damaged. Download it again.") from error
    if not isinstance(dtype, str) or dtype not in _STORED:
        known = ", ".join(_STORED)
        raise CheckpointError(f"{path}: {shortened(name)} has the type {shortened(dtype)!r}, not one of {known}.")
    expected = prod(shape) * np.dtype(_STORED[dtype]).itemsize if whole else -1
    if not whole or len(shape) > MAX_DIMENSIONS or stop - start != expected or first + stop > size or 0 in shape:
        raise CheckpointError(f"{path}: {shortened(name)}: its size does not fit the file. Download it again.")
    return StoredTensor(name, dtype, shape, path, first + start, first + stop)
