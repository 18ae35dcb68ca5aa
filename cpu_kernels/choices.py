"""Chooses tokens from many rows of logits in one call, with the help of other threads.

Unlike the threads of a program (cpu_kernels.threads), helpers never spin and are not waited for: the caller makes all
choices that no helper has begun. So one that wakes late, because other programs use its core, delays nobody.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.arguments import indices_of
from cpu_kernels.choosing import Choice, Choose, choose, memory_bytes
from cpu_kernels.declarations import inner
from cpu_kernels.kernel import compile_all, kernel
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.records import Op, Step, argument, field
from cpu_kernels.simd.doubles import get_f64
from cpu_kernels.simd.threads import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    microseconds,
    sleep,
    ticks,
    wake,
)
from cpu_kernels.simd.vectors import put_i64
from cpu_kernels.threads import await_count

# One cache line each: how many choices there are and the next one that nobody has begun, in one number; how many were
# made since the beginning; callers asleep until all are made; calls; helpers asleep until the next; and the call.
_CLAIMS, _MADE, _ASLEEP, _CALLS, _PARKED, _CALL = (64 * i for i in range(6))
# A call: the choices' operations of `choose`, the address of its code, a step record for each thread, whether to end;
# the first choice's logits, or 0 if the operations have them, and bytes to the next one's; where tokens are written;
# how many choices will have been made since the beginning.
_OPERATIONS, _CHOOSE, _RECORDS, _ENDS, _LOGITS, _STRIDE, _TOKENS, _GOAL = range(8)
_OF_CHOICE = indices_of(Choose)
_BITS = 20
_MASK = (1 << _BITS) - 1
_SPIN_US = 20


@inner
def _make(control: int, thread: int) -> None:
    """Make choices until all are begun.

    The call is read only between beginning a choice and counting it as made: at other times it may be replaced by the
    next one, whose choices are then begun here.
    """
    of_call = control + _CALL
    claimed = atomic_add(control + _CLAIMS, 1)
    while claimed & _MASK < claimed >> _BITS:
        number, logits, goal = claimed & _MASK, field(of_call, _LOGITS), field(of_call, _GOAL)
        operation = field(field(of_call, _OPERATIONS), number)
        record = field(of_call, _RECORDS) + thread * (8 * Step.SIZE)
        if logits != 0:
            put_i64(operation + 8 * (Op.ARGUMENTS + _OF_CHOICE.logits), logits + number * field(of_call, _STRIDE))
        call_kernel(field(of_call, _CHOOSE), operation, record, 0, 1)
        token = get_f64(argument(operation, _OF_CHOICE.choice) + 8 * Choice.TOKEN)
        put_i64(field(of_call, _TOKENS) + 8 * number, int(token))
        made = atomic_add(control + _MADE, 1) + 1
        # A full fence, like the addition: a caller that is not counted here sees the last choice and stays awake.
        if made == goal and atomic_add(control + _ASLEEP, 0) > 0:
            wake(control + _MADE)
        claimed = atomic_add(control + _CLAIMS, 1)


@kernel()
def choose_all(control: int, count: int, thread: int, threads: int) -> None:
    """Make `count` choices, and wait for those that helpers have begun."""
    goal, until = atomic_load(control + _MADE) + count, ticks() + microseconds(_SPIN_US)
    put_i64(control + _CALL + 8 * _GOAL, goal)
    atomic_store(control + _CLAIMS, count << _BITS)
    atomic_add(control + _CALLS, 1)
    if count != 1 and atomic_add(control + _PARKED, 0) > 0:
        wake(control + _CALLS)
    _make(control, 0)
    await_count(control + _MADE, goal, control + _ASLEEP, until)


@kernel()
def help_choosing(control: int, step: int, thread: int, threads: int) -> None:
    """Make choices whenever there are some, asleep in between, until the team ends."""
    seen = 0
    while field(control + _CALL, _ENDS) == 0:
        calls = atomic_load(control + _CALLS)
        if calls != seen:
            seen = calls
            _make(control, thread)
        else:
            atomic_add(control + _PARKED, 1)
            sleep(control + _CALLS, seen)
            atomic_add(control + _PARKED, -1)


def likeliest(logits: NDArray[Any]) -> list[tuple[int, float]]:
    """The likeliest token of each row, and its probability."""
    tokens = logits.argmax(axis=1)
    sums = np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    return [(int(token), 1 / float(total)) for token, total in zip(tokens, sums, strict=True)]


class ChoosingTeam:
    """`threads` threads, the caller's included, that make many choices at once. One thread may call it at a time."""

    def __init__(self, threads: int, most: int, vocab_size: int) -> None:
        """most: choices in a call. vocab_size: logits of each."""
        size = memory_bytes(vocab_size)
        self._scratch = aligned_zeros((threads, size), np.uint8)
        self._records = aligned_zeros((threads, int(Step.SIZE)), np.int64)
        self._records[:, Step.SCRATCH] = self._scratch.ctypes.data + size * np.arange(threads)
        self._operations = aligned_zeros((most,), np.int64)
        self._tokens = aligned_zeros((most,), np.int64)
        self._control = aligned_zeros((_CALL // 8 + 8,), np.int64)
        compile_all([choose, choose_all, help_choosing])
        self._address = self._control.ctypes.data
        self._call = self._control[_CALL // 8 :]
        self._call[:_ENDS] = self._operations.ctypes.data, choose.address, self._records.ctypes.data
        self._call[_TOKENS] = self._tokens.ctypes.data
        self._helpers = [
            threading.Thread(target=self._help, args=(thread,), name=f"localllm-choose-{thread}", daemon=True)
            for thread in range(1, threads)
        ]
        for helper in self._helpers:
            helper.start()

    def run(self, operations: Sequence[int], rows: NDArray[np.float32] | None = None) -> list[int]:
        """Make choices, given the addresses of operations of `choose`; return the tokens, -1 where none is possible.

        rows: float32[len(operations), vocab_size], the logits; None if the operations have their addresses.
        """
        self._operations[: len(operations)] = operations
        self._call[_LOGITS : _STRIDE + 1] = (0, 0) if rows is None else (rows.ctypes.data, rows.strides[0])
        choose_all(self._address, len(operations), 0, 1)
        found: list[int] = self._tokens[: len(operations)].tolist()
        return found

    def close(self) -> None:
        """Stop the helpers. Idempotent."""
        self._call[_ENDS] = 1
        self.run([])
        for helper in self._helpers:
            helper.join()
        self._helpers = []

    def _help(self, thread: int) -> None:
        # A method, so that the helper keeps the memory alive.
        help_choosing(self._address, 0, thread, 1)
