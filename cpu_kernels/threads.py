"""The team of threads that runs a program: how workers wait for a step, and the barrier between operations.

A worker spins for a while after each step and then sleeps, so that decoding never pays for waking it and an idle
process uses no CPU time. It never holds the GIL. At a barrier a thread spins much shorter before it sleeps: if other
programs use the cores too, a spinning thread could keep the thread that it waits for from running.

The operations between two barriers are a phase. On a core that another program uses too, the system takes a thread
off for milliseconds, and the others would have to wait for the items that it holds. So about once in a millisecond a
thread offers its core to others between two phases (on Linux, where this was measured): it leaves the team, yields, and
joins it again in whatever phase the others are in by then. A barrier waits only for the threads that take part. The
last one of them stands in for those that are away, so that each thread's part of each operation is computed once.

Threads meet in groups, each with cache lines of its own. The last one to arrive of the last group releases all groups.
"""

import sys
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
    compare_and_swap,
    microseconds,
    pause,
    sleep,
    ticks,
    wake,
    yield_core,
)
from cpu_kernels.simd.vectors import put_i64

# One cache line each: groups that have arrived at the barrier; the program with its step record, how long a thread runs
# before it offers its core, how long it may be away then (both in microseconds), and when the first thread offers its
# core next. Then for each group of threads: its members, its phase, and threads asleep until the next one.
_GROUPS_ARRIVED, _TEAM, _GROUPS = (64 * i for i in range(3))
_PROGRAM, _STEP, _OFFERS_EVERY, _AWAY, _FIRST_OFFERS = range(5)
_MEMBERS, _PHASE, _SLEEPING, _GROUP_BYTES = (64 * i for i in range(4))
_GROUP_THREADS = 8
# A group's members: the phase's number modulo 2**32, a bit for each thread that takes part in it, how many these are,
# and how many have arrived at its end.
_NUMBER_SHIFT, _BITS_SHIFT, _COUNT_SHIFT, _COUNT_MASK = 32, 16, 8, 0xFF
_TAKING_PART = (1 << _NUMBER_SHIFT) - (1 << _COUNT_SHIFT)
# After the phase's number: the first operation of phases of even and of odd numbers, or one of these.
_FIRST, _BETWEEN_STEPS, _END = 8, -1, -2
_FIRST_PHASE = 2**32 - 1000  # what would only fail after 2**32 phases, which take days, fails in a second
_STEP_SPIN_US, _BARRIER_SPIN_US = 1000, 20
"""How long a worker spins for the next step, and a thread at the barrier, in microseconds."""
OFFERS_EVERY_US, AWAY_US = (1000, 4000) if sys.platform == "linux" else (1 << 40, 0)
"""How long a thread runs before it offers its core to other programs, and may be away then, in microseconds."""


@inner
def _group(control: int, number: int) -> int:
    """Address of a group's lines."""
    return control + _GROUPS + number * _GROUP_BYTES


@inner
def _groups(threads: int) -> int:
    return (threads + _GROUP_THREADS - 1) // _GROUP_THREADS


@inner
def _members(word: int) -> int:
    return word >> _COUNT_SHIFT & _COUNT_MASK


@inner
def _arrived(word: int) -> int:
    return word & _COUNT_MASK


@inner
def _member(thread: int) -> int:
    """What a thread that takes part adds to its group's members."""
    return (1 << _BITS_SHIFT) << thread % _GROUP_THREADS | 1 << _COUNT_SHIFT


@inner
def _first_of(group: int, phase: int) -> int:
    """The first operation of a phase: of the current one, or of the last one until the current one is over."""
    return atomic_load(group + _PHASE + _FIRST + 8 * (phase & 1))


@inner
def _begin(control: int, threads: int, first: int) -> None:
    """Begin the next phase, with operation `first`. All members have arrived, or are between steps.

    The first thread's group comes last: that thread may begin another phase as soon as it sees that a step is over.
    """
    for number in range(_groups(threads) - 1, -1, -1):
        group = _group(control, number)
        phase = atomic_load(group + _PHASE) + 1
        atomic_store(group + _PHASE + _FIRST + 8 * (phase & 1), first)
        word = atomic_load(group + _MEMBERS)
        while compare_and_swap(group + _MEMBERS, word, phase << _NUMBER_SHIFT | word & _TAKING_PART) == 0:
            word = atomic_load(group + _MEMBERS)  # a thread has joined
        atomic_add(group + _PHASE, 1)
        # A full fence, like the addition before: a thread not counted here sees the new phase and stays awake.
        if atomic_add(group + _SLEEPING, 0) > 0:
            wake(group + _PHASE)


@inner
def await_count(counter: int, goal: int, sleeping: int, until: int) -> None:
    """Wait until a counter has reached a goal: first spin, then sleep, since the thread that counts may need this core.

    counter, sleeping: addresses, of the counter and of the number of threads asleep until it changes, for whose sake
    the thread that counts calls `wake`. until: when spinning ends, as `ticks` counts.
    """
    seen = atomic_load(counter)
    while seen < goal:
        if ticks() < until:
            pause()
        else:
            atomic_add(sleeping, 1)
            sleep(counter, seen)
            atomic_add(sleeping, -1)
        seen = atomic_load(counter)


@inner
def _await(group: int, phase: int, spin: int) -> None:
    """Wait until a phase is over, first spinning for so many microseconds."""
    await_count(group + _PHASE, phase + 1, group + _SLEEPING, ticks() + microseconds(spin))


@inner
def _all_arrived(control: int, threads: int) -> bool:
    """Count a group whose members have arrived at the end of their phase; returns whether it was the last of all."""
    groups = _groups(threads)
    if groups > 1:
        if atomic_add(control + _GROUPS_ARRIVED, 1) < groups - 1:
            return False
        atomic_store(control + _GROUPS_ARRIVED, 0)
    return True


@inner
def _leave(group: int, thread: int) -> bool:
    """Stop taking part, unless all others of the group have arrived; returns whether that was possible."""
    word = atomic_load(group + _MEMBERS)
    while _members(word) - _arrived(word) > 1:
        if compare_and_swap(group + _MEMBERS, word, word - _member(thread)):
            return True
        word = atomic_load(group + _MEMBERS)
    return False


@inner
def _join(group: int, thread: int) -> int:
    """Take part again; returns the phase. If all others have arrived at its end, wait for the next one."""
    word = atomic_load(group + _MEMBERS)
    late = _members(word) == _arrived(word)
    while compare_and_swap(group + _MEMBERS, word, word + _member(thread) + (1 if late else 0)) == 0:
        word = atomic_load(group + _MEMBERS)
        late = _members(word) == _arrived(word)
    phase = atomic_load(group + _PHASE)  # differs by one at most; the word has only the lower 32 bits of the number
    phase += (word >> _NUMBER_SHIFT) - phase << _NUMBER_SHIFT >> _NUMBER_SHIFT
    if late:
        _await(group, phase, _BARRIER_SPIN_US)
        phase += 1
    return phase


@inner
def _end_of_phase(program: int, step: int, first: int, threads: int) -> int:
    """The operation after the last one of the phase that begins with operation `first`."""
    count, i, searching = field(program, 0), first, True
    while searching and i < count:
        op = field(program, 1) + i * (8 * Op.SIZE)
        barrier = field(op, Op.BARRIER)
        searching = threads == 1 or not (
            barrier == Barrier.ALWAYS
            or (barrier == Barrier.MANY_ROWS and field(step, Step.ROWS + field(op, Op.STAGE)) > 1)
            or (barrier == Barrier.ADAPTERS and field(step, Step.ADAPTERS) != 0)
        )
        i += 1
    return i


@inner
def _compute(program: int, step: int, first: int, end: int, thread: int, threads: int) -> None:
    """Compute the calling thread's part of operations first..end-1."""
    for i in range(first, end):
        op = field(program, 1) + i * (8 * Op.SIZE)
        kernel = field(op, field(step, Step.WIDTH_INDEX + field(op, Op.STAGE)))
        call_kernel(kernel, op, step, thread, threads)


@inner
def _stand_in(program: int, step: int, first: int, end: int, word: int, thread: int, threads: int) -> None:
    """Compute the parts of those threads of a group that take no part, given the word of its members.

    Little is left of what threads share. But an operation may leave something to one thread, give each a fixed share,
    or have each pack a row for itself, for use in later phases too.
    """
    start = thread // _GROUP_THREADS * _GROUP_THREADS
    for other in range(start, min(start + _GROUP_THREADS, threads)):
        if word >> _BITS_SHIFT >> (other - start) & 1 == 0:
            _compute(program, step, first, end, other, threads)


@inner
def _offers(control: int, offer: int, began: int, first: int, thread: int) -> bool:
    """Whether to offer the core now, before operation `first`. began: when the thread began with the step.

    The first thread would delay the end of the step: it offers its core at the beginning, and if much is left to do.
    """
    now, team = ticks(), control + _TEAM
    if now < offer or thread != 0 or first == 0:
        return now >= offer
    return (now - began) * (field(field(team, _PROGRAM), 0) - first) // first >= microseconds(field(team, _AWAY))


@inner
def _take_part(control: int, phase: int, offer: int, thread: int, threads: int) -> tuple[int, int]:
    """Compute phases until the step is over; returns the phase, and when the thread is to offer its core again.

    A program: (operations, address of their records, turn of this run).
    """
    team, group = control + _TEAM, _group(control, thread // _GROUP_THREADS)
    began = ticks()
    first = _first_of(group, phase)
    while first >= 0:
        if _offers(control, offer, began, first, thread):
            if _leave(group, thread):
                yield_core()
                phase = _join(group, thread)
                first = _first_of(group, phase)
            offer = ticks() + microseconds(field(team, _OFFERS_EVERY))
        if first >= 0:
            program, step = field(team, _PROGRAM), field(team, _STEP)
            end = _end_of_phase(program, step, first, threads)
            _compute(program, step, first, end, thread, threads)
            word = atomic_add(group + _MEMBERS, 1)
            last = _arrived(word) + 1 == _members(word)
            if last:
                _stand_in(program, step, first, end, word, thread, threads)
                last = _all_arrived(control, threads)
            if last:
                _begin(control, threads, end if end < field(program, 0) else _BETWEEN_STEPS)
            else:
                _await(group, phase, _BARRIER_SPIN_US)
            phase += 1
            first = _first_of(group, phase)
    return phase, offer


@kernel()
def lead(control: int, step: int, thread: int, threads: int) -> None:
    """Publish a step and run it as thread 0, in one call, so that no Python exception can come in between.

    If a step were published but not run, the workers would wait at its barriers and go on reading its records.
    """
    team = control + _TEAM
    program = field(team, _PROGRAM)
    if program != 0:
        put_i64(step + 8 * Step.TURN, field(program, 2))
        if threads == 1:
            _compute(program, step, 0, field(program, 0), 0, 1)
        else:
            phase = atomic_load(control + _GROUPS + _PHASE) + 1
            _begin(control, threads, 0)
            _, offer = _take_part(control, phase, field(team, _FIRST_OFFERS), 0, threads)
            put_i64(team + 8 * _FIRST_OFFERS, offer)
    elif threads > 1:
        _begin(control, threads, _END)


@kernel()
def work(control: int, spin: int, thread: int, threads: int) -> None:
    """Run a worker's steps until one has no program. Between steps it spins for `spin` microseconds, then sleeps."""
    group = _group(control, thread // _GROUP_THREADS)
    phase, offer = atomic_load(group + _PHASE), ticks()
    first = _first_of(group, phase)
    while first != _END:
        if first == _BETWEEN_STEPS:
            _await(group, phase, spin)
            phase += 1
        else:
            phase, offer = _take_part(control, phase, offer, thread, threads)
        first = _first_of(group, phase)


class ThreadTeam:
    """`threads` threads, the caller's included, that run programs together.

    Only one thread may call run at a time. A signal handler's exception is raised before or after a step, never within.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        groups = -(-threads // _GROUP_THREADS)
        self._control = aligned_zeros(((_GROUPS + groups * _GROUP_BYTES) // 8,), np.int64)
        self._address = self._control.ctypes.data
        self._team = self._control[_TEAM // 8 : _GROUPS // 8]
        self._team[_OFFERS_EVERY : _AWAY + 1] = OFFERS_EVERY_US, AWAY_US
        lines = self._control[_GROUPS // 8 :].reshape(groups, _GROUP_BYTES // 8)
        lines[:, _PHASE // 8] = _FIRST_PHASE
        lines[:, (_PHASE + _FIRST) // 8] = _BETWEEN_STEPS
        for number in range(groups):
            members = min(_GROUP_THREADS, threads - number * _GROUP_THREADS)
            word = (1 << members) - 1 << _BITS_SHIFT | members << _COUNT_SHIFT
            lines[number, _MEMBERS // 8] = word + (_FIRST_PHASE - 2**32 << _NUMBER_SHIFT)  # signed
        self._lines = aligned_zeros((threads * LINE_BYTES // 8,), np.int64)
        compile_all([lead, work])  # now, not while another thread waits at the barrier
        self._workers: list[threading.Thread] = []
        for t in range(1, threads):
            worker = threading.Thread(target=self._work, args=(t,), name=f"localllm-kernel-{t}", daemon=True)
            worker.start()
            self._workers.append(worker)

    def run(self, program: int, step: int) -> None:
        """Run a program with a step record, given their addresses; return when all of it is computed.

        program: see _take_part; the turn must differ from that of the last run of the same lines.
        """
        self._team[_PROGRAM : _STEP + 1] = program, step
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
