"""A watermark in generated text: after each token, a share of the vocabulary is green and gets higher logits.

Kirchenbauer et al., A Watermark for Large Language Models (arXiv:2301.10226). A key and the token before decide which
tokens are green, so whoever has the key can count green tokens in a text (localllm.wings.lab.quality.watermark).
"""

from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.program import operation_of
from cpu_kernels.records import Op
from cpu_kernels.watermark import HASHES, Raise, hashes, raise_green

_ARRAYS = slice(Op.ARGUMENTS, Op.ARGUMENTS + 3)


@lru_cache(maxsize=4096)
def _seeds(key: str, before: int) -> bytes:
    """Eight bytes for the tokens after `before`."""
    secret = blake2b(key.encode(), person=b"localllm-mark").digest()
    return blake2b(before.to_bytes(8, "little"), digest_size=8, key=secret).digest()


class Watermark:
    """Raises green tokens by delta. gamma: the share of green tokens. before: the text's last token, None if empty."""

    def __init__(self, key: str, delta: float, gamma: float, before: int | None) -> None:
        self._key = key
        self._before = before
        self._seeds = np.zeros(2, np.uint32)
        self._delta = np.array([delta], np.float32)
        arguments = Raise(
            logits=0,
            raised=0,
            count=0,
            seeds=self._seeds.ctypes.data,
            bound=_bound(gamma),
            delta=self._delta.ctypes.data,
        )
        self._operation = operation_of(raise_green, arguments)
        raise_green.address  # noqa: B018 - compiles it if it must be, on the thread of the request

    def accept(self, token_id: int) -> None:
        """Record the newest token."""
        self._before = token_id

    def raised(self, logits: NDArray[np.float32], to: NDArray[np.float32]) -> NDArray[np.float32]:
        """Write the logits with the green ones raised to `to`, which may be the same array; returns it.

        The memory of `to` has room for a multiple of sixteen numbers.
        """
        self._seeds[:] = 0 if self._before is None else np.frombuffer(_seeds(self._key, self._before), np.uint32)
        contiguous = np.ascontiguousarray(logits)
        self._operation[_ARRAYS] = contiguous.ctypes.data, to.ctypes.data, logits.size
        raise_green(self._operation.ctypes.data, 0, 0, 1)
        return to


def green(pairs: NDArray[np.int64], key: str, gamma: float) -> NDArray[np.bool_]:
    """Whether the second token of each pair is green after the first. pairs: int64[count, 2]."""
    seeds = np.frombuffer(b"".join(_seeds(key, before) for before in pairs[:, 0].tolist()), np.uint32).reshape(-1, 2)
    return hashes(pairs[:, 1], seeds[:, 0], seeds[:, 1]) < _bound(gamma)


def _bound(gamma: float) -> int:
    return round(gamma * HASHES)
