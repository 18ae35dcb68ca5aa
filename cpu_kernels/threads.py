"""The threads that run a program together: how they wait for work, and how they meet between operations.

A worker spins outside the interpreter's lock for a while after each step, then parks on a Python lock, so that decoding
never pays for waking it and an idle program costs nothing. Between operations a thread spins much shorter and then
sleeps: where other programs want the cores too, one that spins would keep the one it waits for from running.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.kernel import Kernel, inner, kernel
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.records import Barrier, Op, Step, field
from cpu_kernels.simd.threads import atomic_add, atomic_load, atomic_store, call_kernel, pause, sleep, wake

# One cache line each: arrivals at the barrier, its generation, how many sleep there, the step's generation, the
# program, one a worker.
_LINE = 64
_ARRIVED, _BARRIER, _SLEEPING, _STEP, _PROGRAM, _PARKED = (i * _LINE for i in range(6))
_PROGRAM_FIELD = _PROGRAM // 8
_STOP = -1
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


@kernel
def publish(control: int, unused: int, thread: int, threads: int) -> None:
    """Let spinning workers begin the step; a full fence, so that parked ones are seen as such afterwards."""
    atomic_add(control + _STEP, 1)


@kernel
def lead(control: int, step: int, thread: int, threads: int) -> None:
    """Take part in a published step as thread 0."""
    _run(field(control, _PROGRAM_FIELD), field(control, _PROGRAM_FIELD + 1), control, 0, threads)


@kernel
def work(control: int, spins: int, thread: int, threads: int) -> None:
    """A worker's steps, until it has waited for `spins` turns or is told to stop; then its parked flag is set."""
    mine = control + _PARKED + thread * _LINE
    seen = field(mine, 1)
    waiting = 0
    while waiting >= 0:
        if atomic_load(control + _STEP) != seen:
            seen += 1
            waiting = 0
            if field(control, _PROGRAM_FIELD + 2) == _STOP:
                waiting = -1
            else:
                _run(field(control, _PROGRAM_FIELD), field(control, _PROGRAM_FIELD + 1), control, thread, threads)
        elif waiting < spins:
            waiting += 1
            pause()
        else:
            # A step may have been published just before the flag could be seen; then go on.
            atomic_add(mine, 1)
            if atomic_add(control + _STEP, 0) == seen:
                waiting = -1
            else:
                atomic_add(mine, -1)
    atomic_store(mine + 8, seen)


class ThreadTeam:
    """`threads` threads, the caller's included, that run programs together.

    Only one thread may call run at a time.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._control = aligned_zeros((_PARKED // 8 + (threads + 1) * 8,), np.int64)
        self._address = self._control.ctypes.data
        self._wake = [threading.Semaphore(0) for _ in range(threads)]
        self._stopping = False
        for entry in (publish, lead, work):
            entry.compile()  # here, not while another thread waits at the barrier
        self._workers = [
            threading.Thread(target=self._work, args=(t,), name=f"localllm-kernel-{t}", daemon=True)
            for t in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, program: int, step: int) -> None:
        """Run the program at an address with the step record at another; returns when all threads are done."""
        self._control[_PROGRAM_FIELD : _PROGRAM_FIELD + 2] = (program, step)
        if self._workers:
            publish(self._address, 0, 0, self.threads)
            for t in range(1, self.threads):
                if self._control[_PARKED // 8 + t * 8]:
                    self._wake[t].release()
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
        if self._stopping:
            return
        self._stopping = True
        self._control[_PROGRAM_FIELD + 2] = _STOP
        self._control[_STEP // 8] += 1
        for semaphore in self._wake[1:]:
            semaphore.release()
        for worker in self._workers:
            worker.join()

    def _work(self, thread: int) -> None:
        flag = _PARKED // 8 + thread * 8
        while not self._stopping:
            work(self._address, _SPINS, thread, self.threads)
            if self._stopping:
                return
            self._wake[thread].acquire()
            self._control[flag] = 0
