"""The tokens still in play, which every filter narrows, and finding the largest values fast."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.errors import LocalLLMError, RequestError

# No sound model computes a logit this high; below it, bias and penalties cannot overflow float32.
HIGHEST_LOGIT = 1e30

# Values in a column where the largest are sought.
STACKED = 64


class LogitsError(LocalLLMError):
    """Logits that no token can be chosen from, NaN or absurdly high: an error of the model."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Token ids, ascending and unique, and their logits: int64[n] and float32 or float64[n], n >= 1.

    Ascending ids make every tie fall to the lowest id. The logits are finite. peaks: the result of `peaks`, if known.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.floating]
    peaks: NDArray[np.floating] | None = None

    def keep(self, positions: NDArray[np.intp]) -> "Candidates":
        """Return those at the positions, which ascend."""
        return Candidates(self.ids[positions], self.logits[positions])

    def probabilities(self) -> NDArray[np.float64]:
        """Return the softmax of the logits, float64[n]."""
        weights: NDArray[np.float64] = np.exp(self.logits.astype(np.float64) - float(self.logits.max()))
        weights /= weights.sum()
        return weights


def check_model(highest: float) -> None:
    """Raise LogitsError when the model's own logits are broken. highest: NumPy's maximum of them, NaN if any is."""
    if not highest < HIGHEST_LOGIT:
        raise LogitsError(
            f"The model computed a logit that is {highest}. The model file may be damaged or its quantisation "
            "unsuitable; check the file's hash or try another quantisation."
        )


def check_choice(highest: float) -> None:
    """Raise RequestError when no token is left to choose. highest: the logit of the best one."""
    if highest == -np.inf:
        raise RequestError(
            "No token is allowed next: the constraint, the logit bias and the model together exclude all of them. "
            "Loosen the constraint or the bias."
        )


def peaks(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the largest value of each column of values, STACKED to a column, and the remaining values.

    Finding the largest values takes this one pass over all of them.
    """
    columns = values.size // STACKED
    stack = values[: columns * STACKED].reshape(STACKED, columns)
    return np.concatenate([stack.max(axis=0), values[columns * STACKED :]])


def _contenders(values: NDArray[np.floating], count: int, highest: NDArray[np.floating]) -> NDArray[np.intp]:
    """Return positions, ascending, among which are those of the `count` largest values. highest: the values' peaks.

    Only columns whose peak reaches the count-th highest peak can hold them, so the rest are not looked at again, and no
    array of all values is allocated.
    """
    columns = values.size // STACKED
    border = np.partition(highest, highest.size - count)[highest.size - count]
    high = (highest[:columns] >= border).nonzero()[0]
    inside = (np.arange(0, columns * STACKED, columns)[:, np.newaxis] + high).ravel()
    return np.concatenate([inside, np.arange(columns * STACKED, values.size)])


def best_first(values: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """Return the positions of the `count` largest values, the largest first; of equal ones the lowest position."""
    if count >= values.size:
        return np.asarray((-values).argsort(kind="stable"))
    best = largest(values, count)
    return best[(-values[best]).argsort(kind="stable")]


def largest(values: NDArray[np.floating], count: int, highest: NDArray[np.floating] | None = None) -> NDArray[np.intp]:
    """Return the positions, ascending, of the `count` largest values; ties at the border go to the lowest position.

    highest: the values' peaks, where they are known.
    """
    if count >= values.size:
        return np.arange(values.size)
    if count < values.size // STACKED:
        contenders = _contenders(values, count, peaks(values) if highest is None else highest)
        if contenders.size < values.size:
            return contenders[largest(values[contenders], count)]
    border = np.partition(values, values.size - count)[values.size - count]
    positions: NDArray[np.intp] = (values >= border).nonzero()[0]
    if positions.size > count:
        tied = positions[values[positions] == border]
        surplus = tied[tied.size - (positions.size - count) :]
        positions = np.setdiff1d(positions, surplus, assume_unique=True)
    return positions
