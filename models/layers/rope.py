"""Rotary embeddings: frequencies with their scalings, and tables of cosines and sines that grow on demand.

Linear scaling divides positions. YaRN (Peng et al., 2023) interpolates slow dimensions and leaves fast ones unchanged,
with a ramp between, and sharpens attention. Llama 3 and longrope files have a tensor with a factor for each frequency.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.memory import aligned_zeros
from cpu_kernels.records import Step
from models.architecture import RopePairs
from models.errors import UnsupportedModelError
from models.kv_layout import MAX_ROWS
from models.recording import Recording
from models.sizes.attention import Heads
from models.sizes.rope import QueryGrowth, RopeScaling
from models.weights import Read, WeightLoader

_FIRST_POSITIONS = 4096
_BLOCK_POSITIONS = 256
_ROTATIONS = 2 * math.pi
# Frequency factors for every context, and for those up to the original one and beyond it.
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
GLOBAL_ROPE, LOCAL_ROPE, NO_ROPE, QUERY_ROPE = range(4)
"""Tables in a step record: the usual one, one for sliding-window layers, one without rotation, growing queries."""


def frequencies(
    size: int, base: float, scaling: RopeScaling, factors: NDArray[np.float32] | None
) -> NDArray[np.float64]:
    """Radians per position for each of size/2 rotated pairs: float64[size / 2]."""
    pairs = np.arange(size // 2)
    plain: NDArray[np.float64] = np.exp(pairs * (-2.0 * math.log(base) / size))
    if factors is not None:
        plain = plain / factors.astype(np.float64)
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind != "yarn":
        return plain
    low, high = (
        _pair_that_turns(size, base, scaling.original_context, turns)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    low, high = max(0.0, math.floor(low)), min(size - 1.0, math.ceil(high))
    kept = 1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)
    blended: NDArray[np.float64] = plain / scaling.factor * (1.0 - kept) + plain * kept
    return blended


def magnitude(scaling: RopeScaling) -> float:
    """Factor of cosines and sines: the one that the file states, times YaRN's sharpening."""
    if scaling.kind != "yarn":
        return scaling.attention_factor
    stretch = math.log(max(1.0, scaling.factor))
    return scaling.attention_factor * (1.0 + 0.1 * stretch) / (1.0 + 0.1 * scaling.log_multiplier * stretch)


def _pair_that_turns(size: int, base: float, context: int, turns: float) -> float:
    """The (fractional) index of the pair that makes this many full turns over the original context."""
    return size * math.log(context / (turns * _ROTATIONS)) / (2.0 * math.log(base))


def pair_order(size: int, padded: int, turning: int, pairs: RopePairs) -> NDArray[np.int64]:
    """The source of each value of a head of `size` values, of which the first `turning` are rotated: int64[padded].

    Rotated pairs are placed at i and i + padded/2, whichever way the file pairs them; -1 is padding.
    """
    order, neighbours = np.full(padded, -1, np.int64), pairs is RopePairs.NEIGHBOURS
    first = np.arange(turning // 2)
    order[first] = 2 * first if neighbours else first
    order[padded // 2 + first] = 2 * first + 1 if neighbours else first + turning // 2
    order[np.flatnonzero(order < 0)[: size - turning]] = np.arange(turning, size)
    return order


class RopeTable:
    """Cosines and sines by position, float32[n, 2, padded/2], computed on demand in blocks of positions.

    Blocks not yet computed take no physical memory. growth: multiplies all of a position's entries, including those of
    values that are not rotated. After all positions comes a block for the rows of an image, whose positions have
    several components.
    """

    def __init__(
        self, heads: Heads, radians: NDArray[np.float64], scale: float, growth: QueryGrowth | None = None
    ) -> None:
        self._radians = radians
        self._scale = scale
        self._growth = growth
        self._half = heads.padded_turned // 2
        self.position_bytes = 8 * self._half
        """Bytes of one position's entries."""
        self._reserve(_FIRST_POSITIONS)

    def _reserve(self, positions: int) -> None:
        """Replace the table by an empty one for `positions` positions."""
        blocks = -(-positions // _BLOCK_POSITIONS)
        self._computed = [False] * blocks
        self._positions = blocks * _BLOCK_POSITIONS
        self.table = aligned_zeros((self._positions + MAX_ROWS, 2, self._half), np.float32)
        self.address = self.table.ctypes.data
        """Address of the table; changes when it grows."""

    def cover(self, spans: Sequence[tuple[int, int]]) -> None:
        """Compute the positions first..last (inclusive) of each span, growing the table if needed."""
        longest = max(last for _, last in spans) + 1
        if longest > self._positions:
            self._reserve(max(longest, 2 * self._positions))
        for first, last in spans:
            for block in range(first // _BLOCK_POSITIONS, last // _BLOCK_POSITIONS + 1):
                if not self._computed[block]:
                    self._compute(block)

    def _compute(self, block: int) -> None:
        first = block * _BLOCK_POSITIONS
        positions = np.arange(first, first + _BLOCK_POSITIONS)
        by_pair = np.broadcast_to(positions[:, None], (_BLOCK_POSITIONS, len(self._radians)))
        self._write(self.table[first : first + _BLOCK_POSITIONS], by_pair, positions)
        self._computed[block] = True

    def write_image(self, by_pair: NDArray[np.int32]) -> int:
        """Write an image's rows, int32[rows, pairs]: the position of each pair. Returns the first row's index."""
        self._write(self.table[self._positions :][: len(by_pair)], by_pair, by_pair[:, 0])
        return self._positions

    def _write(self, table: NDArray[np.generic], by_pair: NDArray[np.integer], positions: NDArray[np.integer]) -> None:
        turning = len(self._radians)
        angles = by_pair[:, :turning] * self._radians
        table[:, 0, turning:] = 1.0
        table[:, 0, :turning] = np.cos(angles) * self._scale
        table[:, 1, :turning] = np.sin(angles) * self._scale
        if self._growth is not None:
            steps = (positions + self._growth.offset) // self._growth.length
            factors = 1.0 + self._growth.scale * np.log1p(steps)
            table[:] = np.asarray(table, np.float32) * factors[:, None, None]


class Ropes:
    """A model's tables, and which of them each layer uses."""

    def __init__(self, recording: Recording) -> None:
        """Raises UnsupportedModelError for missing factors, and for heads of two sizes where other tables than the two
        usual ones are needed.
        """
        config, architecture = recording.config, recording.architecture
        self.context = config.context
        """The longest context that will be used; set it before weights are loaded, since factors may depend on it."""
        rotation, scaling = architecture.rotation, config.rope.scaling
        layers = range(config.layers)
        base = config.rope.window_base or rotation.window_base or config.rope.base
        windowed = base, rotation.window_scaling(scaling)
        slides = [architecture.attention.window(config, i) > 0 for i in layers]
        heads = config.attention.layer_heads
        of_all = heads[slides.index(False)] if False in slides else heads[0]
        of_window = heads[slides.index(True)] if True in slides else of_all
        two_sizes = (of_all.padded, of_all.rope_size) != (of_window.padded, of_window.rope_size)
        self._local = any(slides) and (two_sizes or windowed != (config.rope.base, scaling))
        self._components = partial(rotation.components, config.rope.sections, of_all.rope_size // 2)
        factors = self._factors(of_all.rope_size // 2, scaling, recording.loader)
        radians = np.asarray(
            recording.loader.later(
                (of_all.rope_size // 2,),
                lambda: frequencies(of_all.rope_size, config.rope.base, scaling, factors and factors()),
                np.float64,
            ),
            np.float64,
        )
        self._tables = {GLOBAL_ROPE: RopeTable(of_all, radians, magnitude(rotation.scaling(scaling)))}
        if self._local:
            local = frequencies(of_window.rope_size, *windowed, None)
            self._tables[LOCAL_ROPE] = RopeTable(of_window, local, magnitude(windowed[1]))
        some_unturned = not all(rotation.turns(config, i) for i in layers)
        if rotation.before_norms or some_unturned:
            self._tables[NO_ROPE] = RopeTable(of_all, np.zeros(0), 1.0)
        growth = config.rope.query_growth
        self._grows, self._grows_unturned = (
            growth is not None and not some_unturned,
            growth is not None and some_unturned,
        )
        if growth is not None:
            turned = (np.zeros(0), 1.0) if some_unturned else (radians, magnitude(scaling))
            self._tables[QUERY_ROPE] = RopeTable(of_all, *turned, growth)
        if two_sizes and set(self._tables) > {GLOBAL_ROPE, LOCAL_ROPE}:
            raise UnsupportedModelError(
                f"The native engine does not support heads of two sizes in models of the architecture "
                f"{config.architecture}.",
                remedy="The llama.cpp backend may: use --backend llama.",
            )
        self.position_bytes = sum(table.position_bytes for table in self._tables.values())
        """Bytes of all tables per position; the longest sequence determines how many positions there are."""

    def of_layer(self, turns: bool, windowed: bool) -> tuple[int, int]:
        """The indices of the tables for a layer's queries and keys. turns: whether the layer rotates heads."""
        if not turns:
            return QUERY_ROPE if self._grows_unturned else NO_ROPE, NO_ROPE
        if self._local and windowed:
            return LOCAL_ROPE, LOCAL_ROPE
        return QUERY_ROPE if self._grows else GLOBAL_ROPE, GLOBAL_ROPE

    def cover(self, spans: Sequence[tuple[int, int]], step: NDArray[np.generic]) -> None:
        """Compute the positions first..last of each span, and write the tables' addresses into a step record."""
        for index, table in self._tables.items():
            table.cover(spans)
            step[Step.ROPE_TABLES + index] = table.address

    def rows_of(self, turns: NDArray[np.int32], step: NDArray[np.generic]) -> NDArray[np.integer]:
        """The rows in the tables of an image's rows, whose positions are int32[components, rows].

        Computes them, and writes the tables' addresses into a step record.
        """
        if len(turns) == 1:
            self.cover([(int(turns[0, 0]), int(turns[0, -1]))], step)
            return turns.reshape(-1)
        components = self._components()
        firsts = {table.write_image(turns[components].T) for table in self._tables.values()}
        assert len(firsts) == 1  # all tables have grown alike
        return np.arange(turns.shape[1], dtype=np.int32) + firsts.pop()

    def _factors(
        self, pairs: int, scaling: RopeScaling, loader: WeightLoader
    ) -> Callable[[], NDArray[np.float32] | None] | None:
        """What reads the file's frequency factors for the context, if any. Both raise UnsupportedModelError."""
        reads = {name: loader.vector(name, pairs) for name in _FACTORS if loader.has(name)}
        if not reads and scaling.kind != "longrope":
            return None

        def chosen() -> Read | None:
            everywhere, short, long = map(reads.get, _FACTORS)
            found = everywhere or (long if self.context > scaling.original_context else short)
            if scaling.kind == "longrope" and not found:
                raise UnsupportedModelError("The model uses longrope scaling but has no tensor with its factors.")
            return found

        def read() -> NDArray[np.float32] | None:
            factors = values()[:pairs] if (values := chosen()) else None
            if factors is not None and not (np.isfinite(factors).all() and factors.all()):
                raise UnsupportedModelError(
                    "The model's RoPE factors are not all finite and non-zero. Download it again."
                )
            return factors

        chosen()
        return read
