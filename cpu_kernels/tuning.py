"""Prefetch distances of products' weights: measured once on this machine, and stored with the kernels.

The best distance depends on memory latency and on how many cache lines a core can wait for, so it differs between
processors with the same instruction set. It is an argument of compiled code: trying another distance needs no
compilation, and no result depends on it. docs/speed.md has measurements of alternatives.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import PrefetchError
from cpu_kernels.cores import largest_cache, processor_name
from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.isa import POLICY
from cpu_kernels.kernel import compile_all
from cpu_kernels.kernel_cache import read_measured, write_measured
from cpu_kernels.limits import available_memory
from cpu_kernels.matmul import SCRATCH_BYTES
from cpu_kernels.memory import Arena
from cpu_kernels.records import TILE_WIDTHS, Ahead, Step
from cpu_kernels.self_check import Sample

PREFETCH_VARIABLE = "LOCALLLM_PREFETCH"
MOST = 1 << 16
"""The largest prefetch distance in bytes; lines fetched further ahead would be evicted before their use."""
CANDIDATES = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_FILE = "prefetch"
# The format and tile width measured for each kind.
_MEASURED = {Ahead.BLOCKS_32: ("Q8_0", 1), Ahead.BLOCKS_256: ("Q4_K", 1), Ahead.TILES: ("Q4_K", TILE_WIDTHS[1])}
_K = 4096
_CACHES, _LEAST_BYTES, _MOST_BYTES = 3, 64 << 20, 192 << 20
_ROUNDS, _FEWEST_ROUNDS, _SECONDS = 9, 3, 0.3
# A distance replaces the usual one only if its time is below this share; repeated timings vary by about as much.
_CLEAR = 0.97


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Prefetch distances in bytes by kind (`Ahead`), and their origin."""

    distances: tuple[int, ...]
    origin: str

    def __str__(self) -> str:
        return f"{'/'.join(map(str, self.distances))} bytes ahead ({self.origin})"


def prefetch(environment: Mapping[str, str] = os.environ) -> Prefetch:
    """The distances of LOCALLLM_PREFETCH, else those measured on this machine, else the instruction set's usual ones.

    Raises PrefetchError if the variable is invalid.
    """
    if given := environment.get(PREFETCH_VARIABLE):
        return Prefetch(_parsed(given), f"set by {PREFETCH_VARIABLE}")
    if kept := _kept():
        return Prefetch(kept, "measured")
    return Prefetch(POLICY.prefetch, "usual")


def is_measured() -> bool:
    """Whether measured distances for this machine are stored."""
    return _kept() is not None


def measure(clock: Callable[[], float] = time.thread_time) -> Prefetch:
    """Measure on one thread, in less than two seconds, and store distances that are faster than the usual ones.

    clock: measures the calling thread's CPU time. Raises KernelError.
    """
    compile_all([WEIGHT_FORMATS[name].matmul[width] for name, width in _MEASURED.values()])
    size = min(max(_CACHES * largest_cache(), _LEAST_BYTES), _MOST_BYTES, available_memory() // 8)
    weights = Arena().zeros(size)
    weights.fill(1)
    chosen = tuple(_fastest(_Product(weights, kind), POLICY.prefetch[kind], clock) for kind in Ahead)
    write_measured(_FILE, json.dumps({"processor": processor_name(), "distances": chosen}).encode())
    return Prefetch(chosen, "measured")


class _Product:
    """A product whose weights are read from memory, not from a cache. The caller keeps them alive."""

    def __init__(self, weights: NDArray[np.uint8], kind: Ahead) -> None:
        name, width = _MEASURED[kind]
        packing = WEIGHT_FORMATS[name]
        self._kernel, self._field = packing.matmul[width], Step.AHEAD + kind
        groups = len(weights) // packing.group_bytes(_K)
        rows = groups * packing.group_rows
        s = Sample(rows=width, width=width, scratch=SCRATCH_BYTES)
        shape = (groups, packing.group_bytes(_K), packing.group_rows, _K)
        out, packed = s.zeros(width * rows), s.activations(_K)
        self._sample = s.arguments(weights.ctypes.data, *shape, out, 4 * rows, 0, 0, packed, 0)

    def run(self, distance: int) -> None:
        """Compute it once on this thread with a prefetch distance in bytes."""
        self._sample.step({self._field: distance})
        self._sample.run(self._kernel, threads=1)


def _fastest(product: _Product, usual: int, clock: Callable[[], float]) -> int:
    """The distance with the shortest median of several rounds, the usual one unless another is clearly faster."""
    seconds: dict[int, list[float]] = {distance: [] for distance in sorted({usual, *CANDIDATES})}
    product.run(usual)
    first = clock()
    for number in range(_ROUNDS):
        for distance, samples in seconds.items():
            began = clock()
            product.run(distance)
            samples.append(clock() - began)
        if number + 1 >= _FEWEST_ROUNDS and clock() - first > _SECONDS:
            break
    best = min(seconds, key=lambda distance: median(seconds[distance]))
    return best if median(seconds[best]) < _CLEAR * median(seconds[usual]) else usual


def _kept() -> tuple[int, ...] | None:
    """The stored distances, None if there are none or they were measured on another processor."""
    data = read_measured(_FILE)
    if data is None:
        return None
    content = json.loads(data)
    # Machines with different processors may share a folder if their kernels are the same.
    return tuple(content["distances"]) if content["processor"] == processor_name() else None


def _parsed(text: str) -> tuple[int, ...]:
    """Parse one number for all kinds, or one per kind. Raises PrefetchError."""
    parts = text.split(",")
    valid = len(parts) in (1, len(Ahead)) and all(part.strip().isdecimal() and int(part) <= MOST for part in parts)
    if not valid:
        raise PrefetchError(
            f"{PREFETCH_VARIABLE}={text!r}: give one whole number of bytes from 0 to {MOST}, or {len(Ahead)} with "
            "commas between: for one token in blocks of 32, for one token in super-blocks, for several tokens."
        )
    numbers = tuple(map(int, parts))
    return numbers * len(Ahead) if len(numbers) == 1 else numbers
