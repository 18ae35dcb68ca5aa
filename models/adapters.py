"""LoRA adapters in a program: their factors, and the operations that add their changes to matrix products."""

from collections.abc import Callable, Sequence
from itertools import groupby
from math import prod

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.lora import LANES, SPAN, TILE, Factors, Table, TileField
from cpu_kernels.memory import Arena, aligned_zeros
from cpu_kernels.records import Step
from gguf_io.lora import OF_HEADS, OLD_OF_HEADS, TOKENS, Adapter, LoraPair
from gguf_io.runner_info import AdapterSet
from models.config import ModelConfig
from models.errors import UnsupportedModelError
from models.weights import Matrix, WeightLoader

CONCURRENT = 6
"""The most products with adapters that run concurrently."""
_LARGEST_POWER = 14  # values of factors are below 2 ** this
Rows = NDArray[np.int32]


class Adapters:
    """The adapters that a program was recorded with, by number.

    bytes: of their factors in memory.
    """

    def __init__(self, adapters: Sequence[Adapter], config: ModelConfig, loader: WeightLoader) -> None:
        """loader: which reads the factors when it loads the weights."""
        self.loaded, self._loader = adapters, loader
        self.bytes = 0
        self._arena = Arena()
        self._used: set[str] = set()
        # Slots of a row and groups of slots: rows, those of experts and heads.
        self._slots = {(1, 1)}
        ranks = [_padded(adapter.largest_rank) for adapter in adapters]
        self._room = -(-config.longest // SPAN) * max(ranks) * TILE * 4
        self.scratch_bytes = TILE * 4 * max(SPAN, *ranks) + 2 * TILE * LANES * 4
        self._tables = [aligned_zeros((0,), np.int64) for _ in range(2)]
        self._parts = aligned_zeros((0,), np.uint8)
        self._of_rows: list[tuple[AdapterSet, Rows]] = []

    def changed(self, name: str) -> bool:
        """Whether an adapter changes this tensor."""
        return any(name in adapter.pairs for adapter in self.loaded)

    @property
    def changes_heads(self) -> bool:
        """Whether an adapter changes the heads' matrices of attention on latents."""
        return any(name.endswith((*OF_HEADS, OLD_OF_HEADS)) for adapter in self.loaded for name in adapter.pairs)

    def factors_of(self, matrix: Matrix) -> int:
        """Address of the adapters' Factors for a matrix."""
        return self._factors(matrix.name, matrix.rows, matrix, 1.0)

    def factors_of_tokens(self, embedding: int, factor: float) -> int:
        """Address of the adapters' Factors for token embeddings of that many values. factor: multiplies all changes."""
        return self._factors(TOKENS, _padded(embedding), None, factor)

    def check_all_used(self, left_out: set[str]) -> None:
        """Raise UnsupportedModelError for a tensor that would not be changed. left_out: tensors without effect."""
        for adapter in self.loaded:
            for name in adapter.pairs:
                if name not in self._used and name not in left_out:
                    raise UnsupportedModelError(
                        f"{adapter.file.path}: the native engine cannot apply the adapter to the tensor {name}.",
                        remedy="llama.cpp may: use --backend llama.",
                    )

    def table_of_slots(self, rows: int, used: int, groups: int) -> int:
        """Address of a Table for the slots of experts or heads, in a step of that many rows.

        used: slots of a row. groups: experts or heads.
        """
        self._slots.add((used, groups))
        room = self._most_tiles(rows * len(self.loaded))
        return self._loader.builder.buffer(Table.TILES + room * TileField.SIZE, np.int64)

    def peak_bytes(self, rows: int) -> int:
        """Memory of a step of that many rows with one adapter each."""
        return CONCURRENT * self._most_tiles(rows) * self._room

    def place(self, step: NDArray[np.generic], segments: Sequence[tuple[AdapterSet, int, int]]) -> None:
        """Write the table of a step's rows. segments: (adapters, first row, rows) each."""
        step[Step.ADAPTERS] = step[Step.WANTED_ADAPTERS] = 0
        if any(chosen for chosen, _, _ in segments):
            self._of_rows = [
                (chosen, np.arange(first, first + count, dtype=np.int32)) for chosen, first, count in segments
            ]
            step[Step.ADAPTERS] = self._table(0, self._of_rows)

    def place_wanted(self, step: NDArray[np.generic], wanted: Sequence[int]) -> None:
        """Write the table of the rows with requested logits, after `place`."""
        if step[Step.ADAPTERS]:
            rows = np.array(wanted, np.int32)
            among = [
                (chosen, np.flatnonzero((rows >= own[0]) & (rows <= own[-1])).astype(np.int32))
                for chosen, own in self._of_rows
            ]
            step[Step.WANTED_ADAPTERS] = self._table(1, among)

    def _table(self, index: int, segments: Sequence[tuple[AdapterSet, Rows]]) -> int:
        """Write a table of tiles and return its address; it is valid until the next one of this index."""
        uses = sorted(
            ((adapter, weight, rows) for chosen, rows in segments for adapter, weight in chosen if len(rows)),
            key=lambda use: use[0],
        )
        tiles = [np.zeros((0, TileField.SIZE), np.int64)]
        for adapter, same in groupby(uses, key=lambda use: use[0]):
            some = list(same)
            rows = np.concatenate([rows for _, _, rows in some])
            weights = np.concatenate([np.full(len(rows), weight, np.float32) for _, weight, rows in some])
            count = -(-len(rows) // TILE)
            made = np.zeros((count, TileField.SIZE), np.int64)
            made[:, TileField.ADAPTER] = adapter
            for at, values, filling in ((TileField.ROWS, rows, -1), (TileField.WEIGHTS, weights, 0)):
                padded = np.full(count * TILE, filling, values.dtype)
                padded[: len(values)] = values
                made[:, at : at + TILE // 2] = padded.view(np.int64).reshape(count, TILE // 2)
            tiles.append(made)
        whole = np.concatenate(tiles)
        size = Table.TILES + whole.size
        if size > len(self._tables[index]):
            self._tables[index] = aligned_zeros((2 * size,), np.int64)
        table = self._tables[index]
        area = self._most_tiles(sum(len(rows) * len(chosen) for chosen, rows in segments)) * self._room
        if CONCURRENT * area > len(self._parts):
            self._parts = aligned_zeros((2 * CONCURRENT * area,), np.uint8)
        apart = all(len(chosen) < 2 for chosen, _ in segments)
        table[: Table.TILES] = (len(whole), apart, self._parts.ctypes.data, area, self._room, 0, 0, 0)
        table[Table.TILES : size] = whole.reshape(-1)
        return table.ctypes.data

    def _most_tiles(self, pairs: int) -> int:
        """The most tiles for that many pairs of a row and an adapter: of rows, or of their slots."""
        count = len(self.loaded)
        return max(min(pairs * used, pairs * used // TILE + groups * count) for used, groups in self._slots)

    def _factors(self, name: str, outputs: int, matrix: Matrix | None, factor: float) -> int:
        self._used.add(name)
        rows = [
            self._laid_out(adapter, pair, outputs, matrix, factor) if (pair := adapter.pairs.get(name)) else None
            for adapter in self.loaded
        ]

        def make() -> NDArray[np.int64]:
            table = np.zeros((len(rows), Factors.SIZE), np.int64)
            for row, read in zip(table, rows, strict=True):
                if read:
                    row[:] = read()
            return table

        return self._loader.later((len(rows), Factors.SIZE), make, np.int64).ctypes.data

    def _reserve(self, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """Memory for a factor's values."""
        room = self._arena.zeros(2 * prod(shape))
        self._loader.builder.keep(room)
        self.bytes += room.nbytes
        return room.view(np.float16).reshape(shape)

    def _laid_out(
        self, adapter: Adapter, pair: LoraPair, outputs: int, matrix: Matrix | None, factor: float
    ) -> Callable[[], list[int]]:
        """What reads an adapter's factors and returns a row of Factors. matrix: None for token embeddings."""
        of_a, of_b, rank = pair.a.shape[:-2], pair.b.shape[:-2], pair.rank
        if matrix is not None and matrix.experts and not of_b:  # the file has the heads' rows one after the other
            of_a, of_b = ((matrix.experts,), ()) if matrix.turned else ((), (matrix.experts,))
        parts, vectors, inputs = _padded(rank) // LANES, outputs // LANES, matrix.k if matrix else pair.a.shape[0]
        shapes = (prod(of_a), parts, inputs, LANES), (prod(of_b), vectors, rank, LANES)
        rooms = [self._reserve(shape) for shape in shapes]

        def read() -> list[int]:
            down, exponent_a = _scaled(adapter.file.dequantize(pair.a.name))
            up, exponent_b = _scaled(adapter.file.dequantize(pair.b.name))
            if matrix is None:
                down = down.T
            elif matrix.turned:
                down, up = up.reshape(matrix.experts, -1, rank)[:, :inputs].swapaxes(1, 2), down.T
            down, up = down.reshape(shapes[0][0], rank, -1), up.reshape(shapes[1][0], -1, rank)
            ranks = np.zeros((len(down), parts * LANES, inputs), np.float16)
            ranks[:, :rank, : down.shape[2]] = down  # rows of words may be padded
            rows = np.zeros((len(up), outputs, rank), np.float16)
            chosen = np.arange(up.shape[1]) if matrix is None or matrix.order is None else matrix.order
            rows[:, : len(chosen)] = np.where((chosen >= 0)[:, None], up[:, np.maximum(chosen, 0)], 0)
            tokens_first = (0, 1, 3, 2) if matrix else (0, 3, 1, 2)
            turned = ranks.reshape(len(down), parts, LANES, inputs).transpose(tokens_first)
            rooms[0].reshape(turned.shape)[...] = turned
            rooms[1][...] = rows.reshape(len(up), vectors, LANES, rank).swapaxes(2, 3)
            with np.errstate(over="ignore"):
                multiplier = np.float32(np.ldexp(adapter.factor(pair) * factor, -(exponent_a + exponent_b)))
            sizes = [room.nbytes // len(room) if len(room) > 1 else 0 for room in rooms]
            addresses = [room.ctypes.data for room in rooms]
            return [*addresses, rank, parts, int(multiplier.view(np.int32)), *sizes, 0]

        return read


def _padded(rank: int) -> int:
    return -(-rank // LANES) * LANES


def _scaled(values: NDArray[np.float32]) -> tuple[NDArray[np.float16], int]:
    """Values in half precision, times a power of two that uses its range, and the exponent."""
    largest = float(np.abs(values).max())
    exponent = _LARGEST_POWER - int(np.frexp(largest)[1]) if np.isfinite(largest) and largest else 0
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite show in the logits
        return np.ldexp(values, exponent).astype(np.float16), exponent
