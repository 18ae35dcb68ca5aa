"""The threads that run a program together: how they wait for work, and how they meet between operations.

A worker spins for a while after each step and then sleeps, so that decoding never pays for waking it and an idle
program costs nothing. It never holds the interpreter's lock. Between operations a thread spins much shorter before it
sleeps: where other programs want the cores too, one that spins would keep the one it waits for from running.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.declarations import inner
from cpu_kernels.kernel import Kernel, compile_all, kernel
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.records import Barrier, Op, Step, field
from cpu_kernels.simd.threads import atomic_add, atomic_load, atomic_store, call_kernel, pause, sleep, wake

# One cache line each: arrivals at the barrier, its generation, how many sleep there, the step's generation, how many
# workers sleep until the next, and the program with its step record.
_ARRIVED, _BARRIER, _SLEEPING, _STEP, _PARKED, _PROGRAM, _CONTROL_BYTES = (64 * i for i in range(7))
_PROGRAM_FIELD = _PROGRAM // 8
_SPINS = 40_000
_BARRIER_SPINS = 1_000
_OP_BYTES = 8 * int(Op.SIZE)
_OP_BARRIER, _OP_STAGE = int(Op.BARRIER), int(Op.STAGE)
_WIDTH_INDEX, _ROWS = int(Step.WIDTH_INDEX), int(Step.ROWS)
_ALWAYS, _MANY_ROWS = int(Barrier.ALWAYS), int(Barrier.MANY_ROWS)


@inner
def _meet(control: int, threads: int) -> None:
    """Wait until all threads are here: spinning first, then asleep, for the core may be what the last one needs."""
    if threads > 1:
        generation = atomic_load(control + _BARRIER)
        if atomic_add(control + _ARRIVED, 1) == threads - 1:
            atomic_store(control + _ARRIVED, 0)
            atomic_add(control + _BARRIER, 1)
            # A full fence, like the addition before: who is not counted here sees the new generation and stays awake.
            if atomic_add(control + _SLEEPING, 0) > 0:
                wake(control + _BARRIER)
        else:
            turns = 0
            while atomic_load(control + _BARRIER) == generation:
                if turns < _BARRIER_SPINS:
                    turns += 1
                    pause()
                else:
                    atomic_add(control + _SLEEPING, 1)
                    sleep(control + _BARRIER, generation)
                    atomic_add(control + _SLEEPING, -1)


@inner
def _run(program: int, step: int, control: int, thread: int, threads: int) -> None:
    """Run a program's operations. program: address of (operations, address of their records)."""
    ops = field(program, 1)
    for i in range(field(program, 0)):
        op = ops + i * _OP_BYTES
        stage = field(op, _OP_STAGE)
        column = field(step, _WIDTH_INDEX + stage)
        call_kernel(field(op, column), op, step, thread, threads)
        barrier = field(op, _OP_BARRIER)
        if barrier == _ALWAYS or (barrier == _MANY_ROWS and field(step, _ROWS + stage) > 1):
            _meet(control, threads)
    _meet(control, threads)


@kernel()
def lead(control: int, step: int, thread: int, threads: int) -> None:
    """Publish a step and take part in it as thread 0: in one call, so that nothing can come between.

    A step that was published and never led would keep the workers waiting, and reading its records.
    """
    atomic_add(control + _STEP, 1)
    # A full fence, like the addition: a worker that is not counted here sees the step and stays awake.
    if atomic_add(control + _PARKED, 0) > 0:
        wake(control + _STEP)
    if field(control, _PROGRAM_FIELD) != 0:
        _run(field(control, _PROGRAM_FIELD), field(control, _PROGRAM_FIELD + 1), control, 0, threads)


@kernel()
def work(control: int, spins: int, thread: int, threads: int) -> None:
    """A worker's steps, until one has no program. Between steps it spins for `spins` turns, and then sleeps."""
    seen = 0
    waiting = 0
    while waiting >= 0:
        if atomic_load(control + _STEP) != seen:
            seen += 1
            waiting = 0
            if field(control, _PROGRAM_FIELD) == 0:
                waiting = -1
            else:
                _run(field(control, _PROGRAM_FIELD), field(control, _PROGRAM_FIELD + 1), control, thread, threads)
        elif waiting < spins:
            waiting += 1
            pause()
        else:
            atomic_add(control + _PARKED, 1)
            sleep(control + _STEP, seen)
            atomic_add(control + _PARKED, -1)


class ThreadTeam:
    """`threads` threads, the caller's included, that run programs together.

    Only one thread may call run at a time. An exception that a signal raises meanwhile comes before a step or after it.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._control = aligned_zeros((_CONTROL_BYTES // 8,), np.int64)
        self._address = self._control.ctypes.data
        compile_all([lead, work])  # here, not while another thread waits at the barrier
        self._workers = [
            threading.Thread(target=self._work, args=(t,), name=f"localllm-kernel-{t}", daemon=True)
            for t in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, program: int, step: int) -> None:
        """Run the program at an address with the step record at another; returns when all threads are done."""
        self._control[_PROGRAM_FIELD : _PROGRAM_FIELD + 2] = (program, step)
        lead(self._address, step, 0, self.threads)

    def run_kernel(self, kernel: Kernel, op: NDArray[np.generic]) -> None:
        """Run one kernel on all threads with an operation's record; for work outside a program, such as loading."""
        record = op.copy()
        record[Op.KERNELS], record[Op.BARRIER] = kernel.address, Barrier.NEVER
        head = np.array([1, record.ctypes.data], np.int64)
        step = np.zeros(int(Step.SIZE), np.int64)
        self.run(head.ctypes.data, step.ctypes.data)

    def close(self) -> None:
        """Stop the workers. Idempotent."""
        if self._workers:
            self.run(0, 0)
        for worker in self._workers:
            worker.join()
        self._workers = []

    def _work(self, thread: int) -> None:
        # A method, so that the memory where threads meet lives as long as they do.
        work(self._address, _SPINS, thread, self.threads)
