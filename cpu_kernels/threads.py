"""The team of threads that runs a program: how workers wait for a step, and the barrier between operations.

A worker spins for a while after each step and then sleeps, so that decoding never pays for waking it and an idle
process uses no CPU time. It never holds the GIL. At a barrier a thread spins much shorter before it sleeps: if other
programs use the cores too, a spinning thread could keep the thread that it waits for from running.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.declarations import inner
from cpu_kernels.kernel import Kernel, compile_all, kernel
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.records import Barrier, Op, Step, field
from cpu_kernels.simd.threads import atomic_add, atomic_load, atomic_store, call_kernel, pause, sleep, wake

# One cache line each: arrivals at the barrier, its generation, threads asleep there, the step's generation, workers
# asleep until the next step, and the program with its step record.
_ARRIVED, _BARRIER, _SLEEPING, _STEP, _PARKED, _PROGRAM, _CONTROL_BYTES = (64 * i for i in range(7))
_PROGRAM_FIELD = _PROGRAM // 8
_SPINS = 40_000
_BARRIER_SPINS = 1_000


@inner
def _meet(control: int, threads: int) -> None:
    """Barrier: wait for all threads, first spinning, then asleep, since the last thread may need this core."""
    if threads > 1:
        generation = atomic_load(control + _BARRIER)
        if atomic_add(control + _ARRIVED, 1) == threads - 1:
            atomic_store(control + _ARRIVED, 0)
            atomic_add(control + _BARRIER, 1)
            # A full fence, like the addition before: a thread not counted here sees the new generation and stays awake.
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
        op = ops + i * (8 * Op.SIZE)
        stage = field(op, Op.STAGE)
        column = field(step, Step.WIDTH_INDEX + stage)
        call_kernel(field(op, column), op, step, thread, threads)
        barrier = field(op, Op.BARRIER)
        if barrier == Barrier.ALWAYS or (barrier == Barrier.MANY_ROWS and field(step, Step.ROWS + stage) > 1):
            _meet(control, threads)
    _meet(control, threads)


@kernel()
def lead(control: int, step: int, thread: int, threads: int) -> None:
    """Publish a step and run it as thread 0, in one call, so that no Python exception can come in between.

    If a step were published but not run, the workers would wait at its barriers and go on reading its records.
    """
    atomic_add(control + _STEP, 1)
    # A full fence, like the addition: a worker that is not counted here sees the step and stays awake.
    if atomic_add(control + _PARKED, 0) > 0:
        wake(control + _STEP)
    if field(control, _PROGRAM_FIELD) != 0:
        _run(field(control, _PROGRAM_FIELD), field(control, _PROGRAM_FIELD + 1), control, 0, threads)


@kernel()
def work(control: int, spins: int, thread: int, threads: int) -> None:
    """Run a worker's steps until one has no program. Between steps it spins for `spins` turns, then sleeps."""
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

    Only one thread may call run at a time. A signal handler's exception is raised before or after a step, never within.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._control = aligned_zeros((_CONTROL_BYTES // 8,), np.int64)
        self._address = self._control.ctypes.data
        compile_all([lead, work])  # now, not while another thread waits at the barrier
        self._workers = [
            threading.Thread(target=self._work, args=(t,), name=f"localllm-kernel-{t}", daemon=True)
            for t in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, program: int, step: int) -> None:
        """Run a program with a step record, given their addresses; return when all threads are done."""
        self._control[_PROGRAM_FIELD : _PROGRAM_FIELD + 2] = (program, step)
        lead(self._address, step, 0, self.threads)

    def run_kernel(self, kernel: Kernel, op: NDArray[np.generic]) -> None:
        """Run one kernel on all threads with an operation's record, outside of a program, e.g. while loading."""
        record = op.copy()
        record[Op.KERNELS], record[Op.BARRIER] = kernel.address, Barrier.NEVER
        head = np.array([1, record.ctypes.data], np.int64)
        step = np.zeros(Step.SIZE, np.int64)
        self.run(head.ctypes.data, step.ctypes.data)

    def close(self) -> None:
        """Stop the workers. Idempotent."""
        if self._workers:
            self.run(0, 0)
        for worker in self._workers:
            worker.join()
        self._workers = []

    def _work(self, thread: int) -> None:
        # A method, so that the worker keeps the control block alive.
        work(self._address, _SPINS, thread, self.threads)
