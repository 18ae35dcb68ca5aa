"""Loads a file's tensors into packed matrices and padded vectors."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.first_touch import memory_nodes, touch
from cpu_kernels.formats.table import WEIGHT_FORMATS, WORD_FORMATS
from cpu_kernels.formats.weight_format import Repack, WeightFormat
from cpu_kernels.isa import POLICY
from cpu_kernels.kernel import operation_of
from cpu_kernels.memory import Arena
from cpu_kernels.program import ProgramBuilder
from cpu_kernels.threads import ThreadTeam
from cpu_kernels.words import BLOCK
from gguf_io import ModelFile, TensorInfo
from gguf_io.model_file import SLACK_BYTES, TensorRows
from models.errors import UnsupportedModelError, refusal
from models.packed_file import PackedWeights

PORTION_BYTES = 4 << 20
"""Bytes of a matrix that are packed at once, or one group if that is larger."""
ReadRows = Callable[[int, int], NDArray[np.uint8]]
"""Called with the first row and the number of rows; returns their bytes, [row][byte]."""
_SCALED = "NVFP4"
_LAYERS = ("blk.", "v.", "mm.")
"""How names of layers' weights begin, image encoders' included."""
# Such matrices come with factors for 4-bit activations, which these kernels do not use.
_UNUSED = ".input_scale"
# Rotation factors, of which those for the other context length stay unused.
_CHOSEN_BETWEEN = ("rope_factors_long.weight", "rope_factors_short.weight")
ROW_MULTIPLE = 32
"""Outputs are padded to a multiple of this, which every format's group size divides."""


def padded(values: int) -> int:
    """Values rounded up to ROW_MULTIPLE."""
    return -(-values // ROW_MULTIPLE) * ROW_MULTIPLE


def whole_words(values: int) -> int:
    """Values rounded up to whole blocks of words."""
    return -(-values // BLOCK) * BLOCK


def filled(values: int, length: int) -> NDArray[np.int64]:
    """The order 0, 1, ..., values - 1, then -1 up to `length`."""
    return np.where(np.arange(length) < values, np.arange(length), -1)


def repeated(order: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.int64]:
    """An order, repeated for parts that begin at `firsts`."""
    return np.where(order >= 0, order + firsts[..., None], -1).reshape(-1)


def ordered(values: NDArray[np.float32], order: NDArray[np.int64]) -> NDArray[np.float32]:
    """Values [...][value] reordered along the last axis; -1 gives 0."""
    return np.where(order >= 0, values[..., np.maximum(order, 0)], np.float32(0))


@dataclass(frozen=True)
class Matrix:
    """A packed matrix of `rows` outputs (padding included) and k inputs, or one such matrix per expert.

    address, groups: of groups of rows (of one expert), each of group_bytes. scale: the tensor of a factor for the whole
    matrix, one per expert, which is not included in `packed`; empty for none. name, order: the tensor and the source of
    each row, None for its own order. turned: of each head, the transpose of its first k rows.
    """

    format: WeightFormat
    packed: NDArray[np.generic]
    rows: int
    k: int
    group_bytes: int
    experts: int
    scale: str = ""
    name: str = ""
    order: NDArray[np.int64] | None = None
    turned: bool = False
    address: int = field(init=False)
    groups: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.packed.ctypes.data)
        object.__setattr__(self, "groups", self.rows // self.format.group_rows)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's groups."""
        return self.groups * self.group_bytes


@dataclass(frozen=True)
class Packing:
    """How a matrix is packed: rows of k values, whose bytes `read` returns.

    identity: what the matrix is: tensor, format, shape and order of rows. size: its bytes; group_bytes: of a group of
    rows. portions: the source row of each packed row, -1 for zeros, of whole groups and about PORTION_BYTES at a time,
    so that little of the file is in memory at once.
    """

    identity: str
    size: int
    format: WeightFormat
    k: int
    group_bytes: int
    read: ReadRows
    portions: Iterator[NDArray[np.int32]]


class WeightLoader:
    """Reads a file's tensors and packs them on all threads of a team.

    Packed weights live as long as the program that the builder makes.
    """

    def __init__(
        self,
        file: ModelFile,
        team: ThreadTeam | None,
        builder: ProgramBuilder,
        progress: Callable[[str, float], None] | None,
        ready: PackedWeights | None = None,
        *,
        words: bool = False,
    ) -> None:
        """team: None to pack nothing. ready: matrices packed earlier; all others are packed now.

        words: round layers' weights in half precision to words, if this processor multiplies those faster.
        """
        self._file = file
        self._team = team
        self._builder = builder
        self._arena = Arena()
        self._touches = team is not None and memory_nodes() > 1
        self.buffer = np.empty(0, np.uint8)
        self._progress = progress
        self._loaded_bytes = 0
        self._matrices: dict[str, Matrix] = {}
        self._used = {name for name in file.tensors if name.endswith(_UNUSED)}
        self.left_out: set[str] = set()
        """Tensors that do not affect the results."""
        self._ready = ready
        self._words = words and POLICY.multiplies_words
        self.has: Callable[[str], bool] = file.tensors.__contains__
        """Whether the file has a tensor of that name."""
        self.packed: dict[str, NDArray[np.generic]] = {}
        """Packed bytes by identity (tensor, format, shape and row order), as models.packed_file stores them."""

    def of_file(self, file: ModelFile) -> "WeightLoader":
        """A loader for another file of the same program."""
        return WeightLoader(file, self._team, self._builder, self._progress, words=self._words)

    @property
    def packs(self) -> bool:
        """Whether matrices are packed, as opposed to mapped or only counted."""
        return self._team is not None and self._ready is None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, None if the file has none of that name."""
        tensor = self._file.tensors.get(name)
        return None if tensor is None else tensor.shape

    def names(self, start: str) -> list[str]:
        """The tensors whose names begin like this."""
        return [name for name in self._file.tensors if name.startswith(start)]

    def rows(self, name: str) -> int:
        """Rows of a matrix, which the file must have."""
        return self._file.tensors[name].shape[0]

    def leave_out(self, *names: str) -> None:
        """Mark tensors as used that need not be loaded because they do not affect the results."""
        self._used.update(names)
        self.left_out.update(names)

    def check_all_used(self, layers: int, layer: int | None = None) -> None:
        """Raise UnsupportedModelError for tensors that were not used: ignoring them would change the results.

        layers: how many are computed; tensors of later layers, which draft tokens, may stay unused. layer: check only
        this layer's tensors, since later ones are not loaded yet.
        """
        left = set(self._file.tensors).difference(self._used, _CHOSEN_BETWEEN)
        if layer is not None:
            left = {tensor for tensor in left if tensor.startswith(f"blk.{layer}.")}
        names = sorted(tensor for tensor in left if _layer_of(tensor) < layers)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise refusal(self._file, f"the tensor {names[0]}{more} would not be used")

    def refuse_missing(self, name: str) -> NoReturn:
        """Raise UnsupportedModelError for a tensor that the program needs and the file lacks."""
        raise UnsupportedModelError(
            f"{self._file.path}: the tensor {name} is missing. Use another version of the model."
        )

    def vector(self, name: str, size: int, order: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """A one-dimensional tensor as float32, reordered if `order` is given (-1 gives 0), padded with zeros."""
        self._tensor(name, (size,))
        values = self._values(name)
        if order is not None:
            values = ordered(values, order)
        out = np.zeros(padded(len(values)), np.float32)
        out[: len(values)] = values
        return out

    def vectors(self, name: str, count: int, size: int) -> NDArray[np.float32]:
        """A tensor of count x size as float32, each vector padded with zeros; one-dimensional if count is 1."""
        self._tensor(name, (size,) if count == 1 and self.shape(name) == (size,) else (count, size))
        out = np.zeros((count, padded(size)), np.float32)
        out[:, :size] = self._values(name).reshape(count, size)
        return out

    def matrix(
        self,
        name: str,
        rows: int,
        k: int,
        order: NDArray[np.int64] | None = None,
        experts: int = 0,
        *,
        widen: bool = False,
    ) -> Matrix:
        """Pack a tensor of (experts,) rows x k; a single row may be stored as a vector.

        order: source row of each packed row, -1 for zeros, the same for all experts; it may be a part of the rows.
        Without an order, the same name returns the same matrix, so that tied embeddings are stored once. widen: pad
        rows to whole blocks of words if that makes it a matrix of words; its k is then larger.
        """
        if order is None and name in self._matrices:
            return self._matrices[name]
        shape = (experts, rows, k) if experts else (rows, k)
        tensor = self._tensor(name, shape[1:] if rows == 1 and self.shape(name) == (k,) else shape)
        matrix = self._pack(tensor, order, rows, k, experts, widen=widen)
        matrix = replace(matrix, name=name, order=order)
        if order is None:
            self._matrices[name] = matrix
        return matrix

    def values(self, name: str, *shape: int) -> NDArray[np.float32]:
        """A tensor of any shape as float32, for what is computed outside of the program."""
        self._report(self._tensor(name, shape))
        return self._values(name)

    def matrix_of(self, name: str, values: NDArray[np.float32], *, half: bool = False) -> Matrix:
        """Pack a matrix that was computed from tensors, as floats. name: distinguishes it from others.

        half: in half precision, unless the tensor of that name is stored in single precision.
        """
        rows, k = values.shape
        kind = "F16" if half and self._file.tensors[name].type.name != "F32" else "F32"
        stored = np.ascontiguousarray(values, np.float16 if kind == "F16" else np.float32)
        read = lambda low, count: stored[low : low + count].view(np.uint8)  # noqa: E731 - as above
        words = kind == "F16" and self._words and k % BLOCK == 0
        weight_format = (WORD_FORMATS if words else WEIGHT_FORMATS)[kind]
        return self._pack_rows(f"{name} computed", weight_format, read, None, rows, k, 0)

    def rows_in_file(self, name: str, rows: int, k: int) -> tuple[TensorRows, WeightFormat]:
        """A reader of the rows of a rows x k tensor, which stay in the file, and the format to pack them in."""
        tensor = self._tensor(name, (rows, k))
        self._report(tensor)
        return self._file.rows(name), self._format_of(tensor)

    def heads_of(self, name: str, heads: int, rows: int, k: int, order: NDArray[np.int64]) -> Matrix:
        """Pack some rows of each head of a tensor of (heads * rows) x k, with heads in place of experts."""
        matrix = self._pack(self._tensor(name, (heads * rows, k)), order, rows, k, heads)
        return replace(matrix, name=name, order=order)

    def transposed_heads_of(self, name: str, heads: int, rows: int, k: int, count: int) -> Matrix:
        """Pack the first `count` rows of each head of a tensor of (heads * rows) x k, transposed to k x count.

        Blocks run along rows, so a transposed matrix is stored as floats: F32 if the file's type is F32, else F16.
        """
        tensor = self._tensor(name, (heads * rows, k))
        dtype: type[np.generic] = np.float32 if tensor.type.name == "F32" else np.float16

        @cache
        def raw() -> NDArray[np.uint8]:
            values = self._file.dequantize(name).reshape(heads, rows, k)[:, :count].transpose(0, 2, 1)
            return np.ascontiguousarray(values, dtype).reshape(heads * k, count).view(np.uint8)

        weight_format = WEIGHT_FORMATS["F32" if dtype is np.float32 else "F16"]
        read = lambda low, rows: raw()[low : low + rows]  # noqa: E731 - its types follow from the parameter
        matrix = self._pack_rows(f"{name} turned", weight_format, read, None, k, count, heads)
        self._report(tensor)
        return replace(matrix, name=name, turned=True)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            self.refuse_missing(name)
        if tensor.shape != shape:
            raise UnsupportedModelError(
                f"{self._file.path}: the tensor {name} has the shape {tensor.shape} instead of {shape}."
            )
        self._used.add(name)
        return tensor

    def _pack(
        self,
        tensor: TensorInfo,
        order: NDArray[np.int64] | None,
        rows: int,
        k: int,
        experts: int,
        *,
        widen: bool = False,
    ) -> Matrix:
        def read(low: int, count: int) -> NDArray[np.uint8]:
            room = count * tensor.type.row_bytes(k) + SLACK_BYTES
            if len(self.buffer) < room:
                self.buffer = np.empty(room, np.uint8)
            return self._file.data(tensor.name, low, count, self.buffer)

        def read_wide(low: int, count: int) -> NDArray[np.uint8]:
            found = np.zeros((count, tensor.type.row_bytes(wide)), np.uint8)
            found[:, : tensor.type.row_bytes(k)] = read(low, count)
            return found

        weight_format, wide = self._format_of(tensor), k
        # Token embeddings are also read one by one, and stay exact.
        if self._words and tensor.name.startswith(_LAYERS) and tensor.type.name in WORD_FORMATS:
            if widen:
                wide = whole_words(k)
            if wide % BLOCK == 0:
                weight_format = WORD_FORMATS[tensor.type.name]
        reader = read if wide == k else read_wide
        matrix = self._pack_rows(tensor.name, weight_format, reader, order, rows, wide, experts)
        self._report(tensor)
        return matrix

    def _pack_rows(
        self,
        name: str,
        weight_format: WeightFormat,
        read: ReadRows,
        order: NDArray[np.int64] | None,
        rows: int,
        k: int,
        experts: int,
    ) -> Matrix:
        """Pack rows of k values, whose bytes `read` returns. name: part of the identity. order: as for `matrix`."""
        count = rows if order is None else len(order)
        padded_rows = padded(count)
        groups = padded_rows * max(experts, 1) // weight_format.group_rows
        group_bytes = _group_bytes(weight_format, k)
        size = groups * group_bytes
        placed = "" if order is None else hashlib.sha256(np.ascontiguousarray(order, np.int64).data).hexdigest()[:32]
        identity = f"{name}/{weight_format.name}/{experts}x{rows}x{k}/{placed}"
        packed = self.packed.get(identity)  # a key tensor that also serves as value tensor is packed once
        if packed is None:
            together = max(1, PORTION_BYTES // group_bytes) * weight_format.group_rows
            portions = _portions(order, rows, experts, together)
            packed = self._stored(Packing(identity, size, weight_format, k, group_bytes, read, portions))
            self._builder.keep(packed)
            self.packed[identity] = packed
        scale = f"{name.removesuffix('weight')}scale" if weight_format.name == _SCALED else ""
        return Matrix(weight_format, packed, padded_rows, k, group_bytes, experts, scale if self.has(scale) else "")

    def _values(self, name: str) -> NDArray[np.float32]:
        """A tensor's values."""
        return self._file.dequantize(name)

    def _stored(self, packing: Packing) -> NDArray[np.generic]:
        """A packed matrix: one that was packed earlier, or its portions packed now, one after the other."""
        ready = self._ready.find(packing.identity, packing.size) if self._ready else None
        if ready is not None:
            return ready
        packed, position = self._arena.zeros(packing.size), 0
        assert self._team is not None
        if self._touches:
            touch(self._team, packed, packing.group_bytes)
        for source_rows in packing.portions:
            position += self._pack_groups(packed[position:], packing, source_rows)
        return packed

    def _pack_groups(self, target: NDArray[np.generic], packing: Packing, source_rows: NDArray[np.int32]) -> int:
        """Pack a few groups of rows into the beginning of `target`, and return their bytes."""
        weight_format, k = packing.format, packing.k
        groups = len(source_rows) // weight_format.group_rows
        present = source_rows[source_rows >= 0]
        low, high = (int(present.min()), int(present.max()) + 1) if len(present) else (0, 1)
        source = packing.read(low, high - low)
        places = np.where(source_rows >= 0, source_rows - low, -1).astype(np.int32)
        arguments = Repack(
            source=source.ctypes.data,
            row_bytes=source.shape[1],
            packed=target.ctypes.data,
            group_bytes=packing.group_bytes,
            group_rows=weight_format.group_rows,
            k=k,
            rows=places.ctypes.data,
            groups=groups,
        )
        assert self._team is not None
        self._team.run_kernel(weight_format.repack, operation_of(weight_format.repack, arguments))
        return groups * packing.group_bytes

    def _format_of(self, tensor: TensorInfo) -> WeightFormat:
        """The format that a tensor is packed in. Raises UnsupportedModelError for a type without kernels."""
        if (found := _format_named(tensor.type.name)) is None:
            raise UnsupportedModelError(
                f"{self._file.path}: {tensor.name}: there are no kernels for weights of type {tensor.type.name}.",
                remedy="llama.cpp may: use --backend llama.",
            )
        return found

    def _report(self, tensor: TensorInfo) -> None:
        self._loaded_bytes += tensor.nbytes
        if self._progress is not None:
            self._progress("loading weights", min(1.0, self._loaded_bytes / self._file.weights_bytes))


@cache
def _format_named(kind: str) -> WeightFormat | None:
    """The format that a block type is packed in; None without kernels for it."""
    return WEIGHT_FORMATS.get(kind)


@cache
def _group_bytes(weight_format: WeightFormat, k: int) -> int:
    return weight_format.group_bytes(k)


def _layer_of(tensor: str) -> int:
    """The layer that a tensor belongs to, -1 for none."""
    first, _, rest = tensor.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "blk" and number.isdecimal() else -1


def _portions(order: NDArray[np.int64] | None, rows: int, experts: int, together: int) -> Iterator[NDArray[np.int32]]:
    """The portions of a Packing, each of `together` rows."""
    count = rows if order is None else len(order)
    one = np.full(padded(count), -1, np.int64)
    one[:count] = np.arange(rows) if order is None else order
    offsets = np.arange(max(experts, 1))[:, None] * rows
    row_map = np.where(one >= 0, one + offsets, -1).astype(np.int32).reshape(-1)
    for first in range(0, len(row_map), together):
        yield row_map[first : first + together]
