"""Angles of rotary embeddings: frequencies with their scalings, and tables of cosines and sines that grow on demand.

Linear scaling divides positions. YaRN (Peng et al., 2023) interpolates slow dimensions and leaves fast ones, with a
ramp between, and sharpens attention. Llama 3 and longrope files carry a factor for each frequency as a tensor.
"""

import math

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.memory import aligned_zeros
from models.config import ModelConfig, RopeScaling

_FIRST_POSITIONS = 1024
_ROTATIONS = 2 * math.pi


def frequencies(
    size: int, base: float, scaling: RopeScaling, factors: NDArray[np.float32] | None
) -> NDArray[np.float64]:
    """Radians a position for each of size/2 turning pairs."""
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
    """Factor of cosines and sines: YaRN's sharpening, or the one that the file states."""
    if scaling.kind == "yarn":
        return scaling.attention_factor * (1.0 + 0.1 * math.log(scaling.factor))
    return scaling.attention_factor


def _pair_that_turns(size: int, base: float, context: int, turns: float) -> float:
    """The pair that turns this many times over the original context."""
    return size * math.log(context / (turns * _ROTATIONS)) / (2.0 * math.log(base))


def head_order(config: ModelConfig, neighbours: bool) -> NDArray[np.int64]:
    """Where each value of a padded head comes from: int64[padded_head], -1 for padding.

    Turning pairs come to lie at i and i + padded/2, whichever way the file pairs them.
    """
    size, padded, turning = config.head_size, config.padded_head, config.rope_size
    order = np.full(padded, -1, np.int64)
    pairs = np.arange(turning // 2)
    order[pairs] = 2 * pairs if neighbours else pairs
    order[padded // 2 + pairs] = 2 * pairs + 1 if neighbours else pairs + turning // 2
    order[np.flatnonzero(order < 0)[: size - turning]] = np.arange(turning, size)
    return order


class RopeTable:
    """Cosines and sines for positions 0..n-1: float32[n, 2, padded/2], longer whenever asked."""

    def __init__(self, config: ModelConfig, radians: NDArray[np.float64], scale: float) -> None:
        self._radians = radians
        self._scale = scale
        self._half = config.padded_head // 2
        self._table: NDArray[np.generic] = aligned_zeros((0, 2, self._half), np.float32)
        self.address = 0
        """Address of the table; changes when it grows."""
        self.reserve(_FIRST_POSITIONS)

    def reserve(self, positions: int) -> None:
        """Make the table cover positions 0..positions-1."""
        if positions <= len(self._table):
            return
        length = max(positions, 2 * len(self._table))
        table = aligned_zeros((length, 2, self._half), np.float32)
        table[:, 0] = 1.0
        angles = np.arange(length)[:, None] * self._radians
        turning = len(self._radians)
        table[:, 0, :turning] = np.cos(angles) * self._scale
        table[:, 1, :turning] = np.sin(angles) * self._scale
        self._table = table
        self.address = table.ctypes.data
