"""Logit bias and penalties on tokens that already occurred. They change logits in place."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def add_bias(logits: NDArray[np.float32], bias: Mapping[int, float]) -> None:
    """Add each token's bias; minus infinity bans the token."""
    logits[list(bias)] += np.fromiter(bias.values(), dtype=np.float32, count=len(bias))


def penalise_repeats(
    logits: NDArray[np.float32], window: NDArray[np.int64], repeat: float, presence: float, frequency: float
) -> None:
    """Lower the logits of the tokens in the window.

    repeat divides positive logits and multiplies negative ones (CTRL, arXiv:1909.05858); presence is subtracted once,
    frequency once per occurrence (OpenAI's definitions).
    """
    ids, counts = np.unique(window, return_counts=True)
    seen = logits[ids]
    seen = np.where(seen > 0, seen / np.float32(repeat), seen * np.float32(repeat))
    logits[ids] = seen - counts.astype(np.float32) * np.float32(frequency) - np.float32(presence)
