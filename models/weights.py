"""Lays a file's tensors out as packed matrices and padded vectors, and reads and packs them later.

A program is recorded from a file's header alone, for plans as for loading: matrices get places in memory that does not
exist yet (models.late_memory), vectors get arrays of zeros. `WeightLoader.load` then reads, packs and fills in.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.first_touch import memory_nodes, touch
from cpu_kernels.formats.table import WEIGHT_FORMATS, WORD_FORMATS
from cpu_kernels.formats.weight_format import Repack, WeightFormat
from cpu_kernels.isa import POLICY
from cpu_kernels.kernel import Kernel, release_linker
from cpu_kernels.memory import ALIGNMENT, Arena, aligned_zeros
from cpu_kernels.program import ProgramBuilder, operation_of
from cpu_kernels.threads import ThreadTeam
from cpu_kernels.words import BLOCK
from gguf_io import ModelFile, TensorInfo
from gguf_io.model_file import SLACK_BYTES, TensorRows
from gguf_io.runner_info import LoadProgress
from models.errors import UnsupportedModelError, refusal
from models.late_memory import Move, late_places, settle
from models.packed_file import PackedWeights

PORTION_BYTES = 4 << 20
"""Bytes of a matrix that are packed at once, or one group if that is larger."""
ReadRows = Callable[[int, int], NDArray[np.uint8]]
"""Called with the first row and the number of rows; returns their bytes, [row][byte]."""
MakeArray = Callable[[], NDArray[np.generic]]
Read = Callable[[], NDArray[np.float32]]
"""Reads values of a tensor whose presence and shape were checked."""
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

    address: a number in its place, see models.late_memory. groups: of rows (of one expert), each of group_bytes.
    scale: the tensor of a factor for the whole matrix, one per expert, which packing does not apply; empty for none.
    name, order: the tensor and the source of each row, None for its own order. turned: of each head, the transpose of
    its first k rows.
    """

    format: WeightFormat
    address: int
    groups: int
    rows: int
    k: int
    group_bytes: int
    experts: int
    scale: str = ""
    name: str = ""
    order: NDArray[np.int64] | None = None
    turned: bool = False

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's groups."""
        return self.groups * self.group_bytes


@dataclass(frozen=True)
class Packing:
    """How a matrix is packed: rows of k values, whose bytes `read` returns.

    identity: what the matrix is: tensor, format, shape and order of rows. address: as in Matrix. size: its bytes;
    group_bytes: of a group of rows. nbytes: of the tensor that is read. portions: the source row of each packed row, -1
    for zeros, of whole groups and about PORTION_BYTES at a time, so that little of the file is in memory at once.
    """

    identity: str
    address: int
    size: int
    format: WeightFormat
    k: int
    group_bytes: int
    read: ReadRows
    nbytes: int
    portions: Iterator[NDArray[np.int32]]


class WeightLoader:
    """Lays out a file's tensors for a program while it is recorded, and reads and packs them in `load`.

    builder: of the program that keeps alive what is read. builders: all that record operations with these weights.
    """

    def __init__(self, file: ModelFile, *, words: bool = False) -> None:
        """words: round layers' weights in half precision to words, if this processor multiplies those faster."""
        self._file = file
        self.builder = ProgramBuilder()
        self.builders = [self.builder]
        self._places = late_places()
        self._pending: deque[Packing | tuple[NDArray[np.generic], MakeArray]] = deque()
        """What `load` packs, and the arrays that it fills."""
        self._others: list[WeightLoader] = []
        self._buffer = np.empty(0, np.uint8)
        self._matrices: dict[str, Matrix] = {}
        self._used: set[str] = set()
        self.left_out: set[str] = set()
        """Tensors that do not affect the results."""
        self._words = words and POLICY.multiplies_words
        self.has: Callable[[str], bool] = file.tensors.__contains__
        """Whether the file has a tensor of that name."""
        self.packings: dict[str, Packing] = {}
        """The matrices by identity."""
        self.packed: dict[str, NDArray[np.generic]] = {}
        """Their bytes once they are loaded, as models.packed_file stores them."""

    def of_file(self, file: ModelFile) -> "WeightLoader":
        """A loader for another file of the same program, which `load` loads too."""
        other = WeightLoader(file, words=self._words)
        other.builder, other.builders, other._places = self.builder, self.builders, self._places
        self._others.append(other)
        return other

    @property
    def packed_bytes(self) -> int:
        """Bytes of all packed matrices, including those from the program's other files."""
        return sum(packing.size for loader in (self, *self._others) for packing in loader.packings.values())

    @property
    def packers(self) -> tuple[Kernel, ...]:
        """The kernels that pack them."""
        found: dict[Kernel, None] = {}
        for loader in (self, *self._others):
            for packing in loader.packings.values():
                found[packing.format.repack] = None
        return tuple(found)

    def load(
        self,
        team: ThreadTeam,
        progress: LoadProgress | None = None,
        ready: PackedWeights | None = None,
        moves: Sequence[Move] = (),
    ) -> None:
        """Read and pack everything that was laid out, on all threads of a team, and put addresses into all operations.

        ready: matrices packed earlier; all others are packed now. moves: of other memory. The file may be closed
        afterwards.
        """
        found = self._load(team, progress, ready)
        for other in self._others:
            found += other._load(team, progress, None)
        for builder in self.builders:
            settle(builder, [*found, *moves])

    def _load(self, team: ThreadTeam, progress: LoadProgress | None, ready: PackedWeights | None) -> list[Move]:
        """Do what is pending; return where matrices are."""
        packers, missing = set[Kernel](), 0
        for name, packing in self.packings.items():
            if ready is not None and (mapped := ready.find(name, packing.size)) is not None:
                self.packed[name] = mapped
            else:
                packers.add(packing.format.repack)
                missing += -(-packing.size // ALIGNMENT) * ALIGNMENT
        for kernel in packers:
            kernel.address  # noqa: B018 - links it
        if packers:
            release_linker()
        room = Arena().zeros(missing)
        for memory in (room, *self.packed.values()):
            self.builder.keep(memory)
        moves, touches, done, shown = list[Move](), memory_nodes() > 1, 0, 0
        while self._pending:
            task = self._pending.popleft()
            if not isinstance(task, Packing):
                array, make = task
                array[...] = make()
                continue
            packed = self.packed.get(task.identity)
            if packed is None:
                packed, room = room[: task.size], room[-(-task.size // ALIGNMENT) * ALIGNMENT :]
                if touches:
                    touch(team, packed, task.group_bytes)
                position = 0
                for source_rows in task.portions:
                    position += pack_groups(team, task, source_rows, packed[position:])
                self.packed[task.identity] = packed
            moves.append((task.address, task.address + task.size, packed.ctypes.data - task.address))
            del self.packings[task.identity]  # it may hold what was read
            done += task.nbytes
            if progress is not None and shown != (shown := 100 * done // self._file.weights_bytes):
                progress("loading weights", min(1.0, shown / 100))
        self._buffer = np.empty(0, np.uint8)
        return moves

    def new_builder(self) -> ProgramBuilder:
        """A builder for another program with these weights."""
        self.builders.append(ProgramBuilder())
        return self.builders[-1]

    def later(
        self, shape: tuple[int, ...], make: MakeArray, dtype: type[np.generic] = np.float32
    ) -> NDArray[np.generic]:
        """An array of zeros that lives with the program, and which `load` fills with what `make` returns."""
        array = aligned_zeros(shape, dtype)
        self.builder.keep(array)
        self._pending.append((array, make))
        return array

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

    def check_all_used(self, layers: int) -> None:
        """Raise UnsupportedModelError for tensors that were not used: ignoring them would change the results.

        layers: how many are computed; tensors of later layers, which draft tokens, may stay unused.
        """
        left = set(self._file.tensors).difference(self._used, _CHOSEN_BETWEEN)
        names = sorted(name for name in left if _layer_of(name) < layers and not name.endswith(_UNUSED))
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise refusal(self._file, f"the tensor {names[0]}{more} would not be used")

    def refuse_missing(self, name: str) -> NoReturn:
        """Raise UnsupportedModelError for a tensor that the program needs and the file lacks."""
        raise UnsupportedModelError(
            f"{self._file.path}: the tensor {name} is missing. Use another version of the model."
        )

    def vector(self, name: str, size: int, order: NDArray[np.int64] | None = None) -> Read:
        """A one-dimensional tensor as float32, reordered if `order` is given (-1 gives 0), padded with zeros."""
        self._tensor(name, (size,))

        def read() -> NDArray[np.float32]:
            values = self._file.dequantize(name)
            if order is not None:
                values = ordered(values, order)
            out = np.zeros(padded(len(values)), np.float32)
            out[: len(values)] = values
            return out

        return read

    def vectors(self, name: str, count: int, size: int) -> Read:
        """A tensor of count x size as float32, each vector padded with zeros; one-dimensional if count is 1."""
        self._tensor(name, (size,) if count == 1 and self.shape(name) == (size,) else (count, size))

        def read() -> NDArray[np.float32]:
            out = np.zeros((count, padded(size)), np.float32)
            out[:, :size] = self._file.dequantize(name).reshape(count, size)
            return out

        return read

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
        if order is None:
            self._matrices[name] = matrix
        return matrix

    def values(self, name: str, *shape: int) -> Read:
        """A tensor of any shape as float32."""
        self._tensor(name, shape)
        return partial(self._file.dequantize, name)

    def array(self, name: str, *shape: int) -> NDArray[np.float32]:
        """A tensor of any shape, for what is computed outside of the program: zeros until `load`."""
        return np.asarray(self.later(shape, self.values(name, *shape)), np.float32)

    def matrix_of(self, name: str, rows: int, k: int, make: Read, *, half: bool = False) -> Matrix:
        """Pack a matrix that `make` computes from tensors, as floats. name: distinguishes it from others.

        half: in half precision, unless the tensor of that name is stored in single precision.
        """
        kind = "F16" if half and self._file.tensors[name].type.name != "F32" else "F32"

        @cache
        def raw() -> NDArray[np.uint8]:
            stored = np.ascontiguousarray(make(), np.float16 if kind == "F16" else np.float32)
            return stored.view(np.uint8).reshape(rows, -1)

        words = kind == "F16" and self._words and k % BLOCK == 0
        weight_format = (WORD_FORMATS if words else WEIGHT_FORMATS)[kind]
        return self._pack_rows(f"{name} computed", weight_format, lambda low, count: raw()[low : low + count], rows, k)

    def rows_in_file(self, name: str, rows: int, k: int) -> tuple[TensorRows, WeightFormat]:
        """A reader of the rows of a rows x k tensor, which stay in the file, and the format to pack them in."""
        tensor = self._tensor(name, (rows, k))
        return self._file.rows(name), self._format_of(tensor)

    def heads_of(self, name: str, heads: int, rows: int, k: int, order: NDArray[np.int64]) -> Matrix:
        """Pack some rows of each head of a tensor of (heads * rows) x k, with heads in place of experts."""
        return self._pack(self._tensor(name, (heads * rows, k)), order, rows, k, heads)

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
        matrix = self._pack_rows(f"{name} turned", weight_format, read, k, count, experts=heads, nbytes=tensor.nbytes)
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
            room = count * row_bytes + SLACK_BYTES
            if len(self._buffer) < room:
                self._buffer = np.empty(room, np.uint8)
            return self._file.data(tensor.name, low, count, self._buffer)

        def read_wide(low: int, count: int) -> NDArray[np.uint8]:
            found = np.zeros((count, tensor.type.row_bytes(wide)), np.uint8)
            found[:, :row_bytes] = read(low, count)
            return found

        weight_format, wide, row_bytes = self._format_of(tensor), k, tensor.nbytes // (rows * max(experts, 1))
        # Token embeddings are also read one by one, and stay exact.
        if self._words and tensor.name.startswith(_LAYERS) and tensor.type.name in WORD_FORMATS:
            if widen:
                wide = whole_words(k)
            if wide % BLOCK == 0:
                weight_format = WORD_FORMATS[tensor.type.name]
        reader = read if wide == k else read_wide
        matrix = self._pack_rows(
            tensor.name, weight_format, reader, rows, wide, order=order, experts=experts, nbytes=tensor.nbytes
        )
        return replace(matrix, name=tensor.name, order=order)

    def _pack_rows(
        self,
        name: str,
        weight_format: WeightFormat,
        read: ReadRows,
        rows: int,
        k: int,
        *,
        order: NDArray[np.int64] | None = None,
        experts: int = 0,
        nbytes: int = 0,
    ) -> Matrix:
        """Lay out rows of k values, whose bytes `read` returns. name: part of the identity. order: as for `matrix`.

        nbytes: of the tensor that is read.
        """
        count = rows if order is None else len(order)
        padded_rows = padded(count)
        groups = padded_rows * max(experts, 1) // weight_format.group_rows
        group_bytes = weight_format.group_bytes(k)
        placed = "" if order is None else hashlib.sha256(np.ascontiguousarray(order, np.int64).data).hexdigest()[:32]
        identity = f"{name}/{weight_format.name}/{experts}x{rows}x{k}/{placed}"
        packing = self.packings.get(identity)  # a key tensor that also serves as value tensor is packed once
        if packing is None:
            together = max(1, PORTION_BYTES // group_bytes) * weight_format.group_rows
            portions = _portions(order, rows, experts, together)
            sizes = groups * group_bytes, weight_format, k, group_bytes
            packing = Packing(identity, next(self._places), *sizes, read, nbytes, portions)
            self.packings[identity] = packing
            self._pending.append(packing)
        scale = f"{name.removesuffix('weight')}scale" if weight_format.name == _SCALED else ""
        scale = scale if self.has(scale) else ""
        of_one = padded_rows // weight_format.group_rows
        return Matrix(weight_format, packing.address, of_one, padded_rows, k, group_bytes, experts, scale)

    def _format_of(self, tensor: TensorInfo) -> WeightFormat:
        """The format that a tensor is packed in. Raises UnsupportedModelError for a type without kernels."""
        if (found := WEIGHT_FORMATS.get(tensor.type.name)) is None:
            raise UnsupportedModelError(
                f"{self._file.path}: {tensor.name}: there are no kernels for weights of type {tensor.type.name}.",
                remedy="llama.cpp may: use --backend llama.",
            )
        return found


def pack_groups(team: ThreadTeam, packing: Packing, source_rows: NDArray[np.int32], target: NDArray[np.generic]) -> int:
    """Pack a few groups of a matrix's rows into the beginning of `target`, and return their bytes."""
    weight_format = packing.format
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
        k=packing.k,
        rows=places.ctypes.data,
        groups=groups,
    )
    team.run_kernel(weight_format.repack, operation_of(weight_format.repack, arguments))
    return groups * packing.group_bytes


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
