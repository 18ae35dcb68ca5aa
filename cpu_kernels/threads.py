"""The team of threads that runs a program: how workers wait for a step, and the barrier between operations.

A worker spins for a while after each step and then sleeps, so that decoding never pays for waking it and an idle
process uses no CPU time. It never holds the GIL. At a barrier a thread spins much shorter before it sleeps: if other
programs use the cores too, a spinning thread could keep the thread that it waits for from running.

Threads meet in groups, each with cache lines of its own. The last one to arrive of the last group releases all groups.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.declarations import inner
from cpu_kernels.kernel import Kernel, compile_all, kernel
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.records import Barrier, Op, Step, field
from cpu_kernels.sharing import LINE_BYTES
from cpu_kernels.simd.threads import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    microseconds,
    pause,
    sleep,
    ticks,
    wake,
)
from cpu_kernels.simd.vectors import put_i64

# One cache line each: groups that have arrived at the barrier, the step's generation, workers asleep until the next
# step, and the program with its step record. Then for each group of threads: arrivals at the barrier, its generation,
# and threads asleep there.
_GROUPS_ARRIVED, _STEP, _PARKED, _PROGRAM, _GROUPS = (64 * i for i in range(5))
_ARRIVED, _BARRIER, _SLEEPING, _GROUP_BYTES = (64 * i for i in range(4))
_PROGRAM_FIELD = _PROGRAM // 8
_GROUP_THREADS = 8
_STEP_SPIN_US, _BARRIER_SPIN_US = 1000, 20
"""How long a worker spins for the next step, and a thread at the barrier, in microseconds."""


@inner
def _group(control: int, number: int) -> int:
    """Address of a group's lines."""
    return control + _GROUPS + number * _GROUP_BYTES


@inner
def _arrive(control: int, thread: int, threads: int) -> bool:
    """Count a thread that has arrived at the barrier; returns whether it was the last of all."""
    number = thread // _GROUP_THREADS
    group, groups = _group(control, number), (threads + _GROUP_THREADS - 1) // _GROUP_THREADS
    if atomic_add(group + _ARRIVED, 1) < min(_GROUP_THREADS, threads - number * _GROUP_THREADS) - 1:
        return False
    atomic_store(group + _ARRIVED, 0)
    if groups > 1:
        if atomic_add(control + _GROUPS_ARRIVED, 1) < groups - 1:
            return False
        atomic_store(control + _GROUPS_ARRIVED, 0)
    return True


@inner
def _meet(control: int, thread: int, threads: int) -> None:
    """Barrier: wait for all threads, first spinning, then asleep, since the last thread may need this core."""
    if threads > 1:
        group = _group(control, thread // _GROUP_THREADS)
        generation = atomic_load(group + _BARRIER)
        if _arrive(control, thread, threads):
            for number in range((threads + _GROUP_THREADS - 1) // _GROUP_THREADS):
                other = _group(control, number)
                atomic_add(other + _BARRIER, 1)
                # A full fence, like the addition before: a thread not counted here sees the new generation and stays
                # awake.
                if atomic_add(other + _SLEEPING, 0) > 0:
                    wake(other + _BARRIER)
        else:
            until = ticks() + microseconds(_BARRIER_SPIN_US)
            while atomic_load(group + _BARRIER) == generation:
                if ticks() < until:
                    pause()
                else:
                    atomic_add(group + _SLEEPING, 1)
                    sleep(group + _BARRIER, generation)
                    atomic_add(group + _SLEEPING, -1)


@inner
def _run(program: int, step: int, control: int, thread: int, threads: int) -> None:
    """Run a program's operations. program: address of (operations, address of their records, turn of this run)."""
    ops = field(program, 1)
    for i in range(field(program, 0)):
        op = ops + i * (8 * Op.SIZE)
        stage = field(op, Op.STAGE)
        column = field(step, Step.WIDTH_INDEX + stage)
        call_kernel(field(op, column), op, step, thread, threads)
        barrier = field(op, Op.BARRIER)
        if (
            barrier == Barrier.ALWAYS
            or (barrier == Barrier.MANY_ROWS and field(step, Step.ROWS + stage) > 1)
            or (barrier == Barrier.ADAPTERS and field(step, Step.ADAPTERS) != 0)
        ):
            _meet(control, thread, threads)
    _meet(control, thread, threads)


@kernel()
def lead(control: int, step: int, thread: int, threads: int) -> None:
    """Publish a step and run it as thread 0, in one call, so that no Python exception can come in between.

    If a step were published but not run, the workers would wait at its barriers and go on reading its records.
    """
    if field(control, _PROGRAM_FIELD) != 0:
        put_i64(step + 8 * Step.TURN, field(field(control, _PROGRAM_FIELD), 2))
    atomic_add(control + _STEP, 1)
    # A full fence, like the addition: a worker that is not counted here sees the step and stays awake.
    if atomic_add(control + _PARKED, 0) > 0:
        wake(control + _STEP)
    if field(control, _PROGRAM_FIELD) != 0:
        _run(field(control, _PROGRAM_FIELD), field(control, _PROGRAM_FIELD + 1), control, 0, threads)


@kernel()
def work(control: int, spin: int, thread: int, threads: int) -> None:
    """Run a worker's steps until one has no program. Between steps it spins for `spin` microseconds, then sleeps."""
    seen = 0
    until = ticks() + microseconds(spin)
    working = True
    while working:
        if atomic_load(control + _STEP) != seen:
            seen += 1
            if field(control, _PROGRAM_FIELD) == 0:
                working = False
            else:
                _run(field(control, _PROGRAM_FIELD), field(control, _PROGRAM_FIELD + 1), control, thread, threads)
            until = ticks() + microseconds(spin)
        elif ticks() < until:
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
        groups = -(-threads // _GROUP_THREADS)
        self._control = aligned_zeros(((_GROUPS + groups * _GROUP_BYTES) // 8,), np.int64)
        self._address = self._control.ctypes.data
        self._lines = aligned_zeros((threads * LINE_BYTES // 8,), np.int64)
        compile_all([lead, work])  # now, not while another thread waits at the barrier
        self._workers: list[threading.Thread] = []
        for t in range(1, threads):
            worker = threading.Thread(target=self._work, args=(t,), name=f"localllm-kernel-{t}", daemon=True)
            worker.start()
            self._workers.append(worker)

    def run(self, program: int, step: int) -> None:
        """Run a program with a step record, given their addresses; return when all threads are done.

        program: see Program; the turn must differ from that of the last run of the same lines.
        """
        self._control[_PROGRAM_FIELD : _PROGRAM_FIELD + 2] = (program, step)
        lead(self._address, step, 0, self.threads)

    def run_kernel(self, kernel: Kernel, op: NDArray[np.generic]) -> None:
        """Run one kernel on all threads with an operation's record, outside of a program, e.g. while loading."""
        record = op.copy()
        record[Op.KERNELS], record[Op.BARRIER] = kernel.address, Barrier.NEVER
        record[Op.LINES] = self._lines.ctypes.data
        self._lines[:] = 0
        head = np.array([1, record.ctypes.data, 1], np.int64)
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
        work(self._address, _STEP_SPIN_US, thread, self.threads)
