"""Teams of threads: all take part in every step, asleep or not, whatever interrupts the caller."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.kernel import kernel
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.program import ProgramBuilder
from cpu_kernels.records import Barrier, Op, Step, argument, field
from cpu_kernels.simd.threads import pause
from cpu_kernels.simd.vectors import get_i64, put_i64
from cpu_kernels.threads import ThreadTeam

STEPS, OPERATIONS = 30, 60


@kernel()
def count_step(op: int, step: int, thread: int, threads: int) -> None:
    """Add one to the thread's own counter."""
    mine = argument(op, 0) + 64 * thread
    put_i64(mine, get_i64(mine) + 1)


@pytest.mark.parametrize(("threads", "pause"), [(1, 0.0), (2, 0.0), (2, 0.03), (5, 0.0), (5, 0.03), (17, 0.0)])
def test_every_thread_takes_part_in_every_step(threads: int, pause: float) -> None:
    """During the pause, workers fall asleep before the next step and must be woken."""
    counters = aligned_zeros((threads, 8), np.int64)
    op = aligned_zeros((int(Op.SIZE),), np.int64)
    op[Op.ARGUMENTS] = counters.ctypes.data
    team = ThreadTeam(threads)
    try:
        for done in range(1, STEPS + 1):
            team.run_kernel(count_step, op)
            assert counters[:, 0].tolist() == [done] * threads
            time.sleep(pause)
    finally:
        team.close()
        team.close()


class Counters(Arguments):
    """Arguments of take_turns and copy_count."""

    counters: int  # a line of 64 bytes, and one for each thread
    slow: int = 0  # a thread


_COUNTERS = indices_of(Counters)


@kernel(Counters)
def take_turns(op: int, step: int, thread: int, threads: int) -> None:
    """One thread is much slower; then all copy its count."""
    if thread == argument(op, _COUNTERS.slow):
        for _ in range(200_000):
            pause()
        put_i64(argument(op, _COUNTERS.counters), get_i64(argument(op, _COUNTERS.counters)) + 1)


@kernel(Counters)
def copy_count(op: int, step: int, thread: int, threads: int) -> None:
    """Copy the count into the thread's own line."""
    counters = argument(op, _COUNTERS.counters)
    put_i64(counters + 64 * (1 + thread), get_i64(counters))


@pytest.mark.parametrize("threads", [2, 3, 7, 19])
def test_threads_that_fell_asleep_at_a_barrier_go_on(threads: int) -> None:
    """Whichever thread is slow, the others see its result, also with more threads than cores."""
    counters = aligned_zeros((1 + threads, 8), np.int64)
    builder = ProgramBuilder()
    late = [thread for thread in range(0, threads, 1 + threads // 8) for _ in range(3)]
    for thread in late:
        arguments = Counters(counters=counters.ctypes.data, slow=thread)
        builder.add(take_turns, arguments, barrier=Barrier.ALWAYS)
        builder.add(copy_count, arguments, barrier=Barrier.ALWAYS)
    program = builder.build()
    step = aligned_zeros((int(Step.SIZE),), np.int64)
    team = ThreadTeam(threads)
    try:
        for done in range(1, 4):
            program.run(team, step.ctypes.data)
            assert counters[:, 0].tolist() == [done * len(late)] * (1 + threads)
    finally:
        team.close()


class Passing(Arguments):
    """Arguments of pass_on."""

    before: int  # a line of 64 bytes for each thread: a number
    after: int  # the same; then how often the thread has written it
    number: int  # of the operation


_PASSING = indices_of(Passing)


@kernel(Passing)
def pass_on(op: int, step: int, thread: int, threads: int) -> None:
    """The thread's number is one more than the mean of all before; threads take unequal time."""
    before, mine = argument(op, _PASSING.before), argument(op, _PASSING.after) + 64 * thread
    total = 0
    for other in range(threads):
        total += get_i64(before + 64 * other)
    for _ in range((5 * thread + 3 * argument(op, _PASSING.number) + field(step, Step.TURN)) % 7 * 20):
        pause()
    put_i64(mine, total // threads + 1)
    put_i64(mine + 8, get_i64(mine + 8) + 1)


@pytest.mark.parametrize("threads", [2, 3, 9])
def test_threads_leave_and_join_between_any_two_operations(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread's part of each operation is computed once, after all of the operation before it."""
    monkeypatch.setattr("cpu_kernels.threads.OFFERS_EVERY_US", 0)
    monkeypatch.setattr("cpu_kernels.threads.AWAY_US", 0)
    lines = aligned_zeros((OPERATIONS + 1, threads, 8), np.int64)
    builder = ProgramBuilder()
    for number in range(OPERATIONS):
        before, after = lines[number].ctypes.data, lines[number + 1].ctypes.data
        builder.add(pass_on, Passing(before=before, after=after, number=number), barrier=Barrier.ALWAYS)
    program, step = builder.build(), aligned_zeros((int(Step.SIZE),), np.int64)
    op = aligned_zeros((int(Op.SIZE),), np.int64)
    op[Op.ARGUMENTS] = lines[0].ctypes.data
    team = ThreadTeam(threads)
    try:
        for done in range(1, 11):
            program.run(team, step.ctypes.data)
            expected = [[done - 1 + number] * threads for number in range(1, OPERATIONS + 1)]
            assert lines[1:, :, 0].tolist() == expected
            assert (lines[1:, :, 1] == done).all()
            team.run_kernel(count_step, op)
            assert lines[0, :, 0].tolist() == [done] * threads
    finally:
        team.close()


INTERRUPTED = """
import random, signal, sys
import numpy as np
from cpu_kernels.records import Op
from cpu_kernels.threads import ThreadTeam
from tests.cpu_kernels.test_threads import count_step

class Interrupt(Exception):
    pass

def interrupt(*_):
    raise Interrupt

count_step.address  # compiles it
counters, op = np.zeros((4, 8), np.int64), np.zeros(int(Op.SIZE), np.int64)
op[Op.ARGUMENTS] = counters.ctypes.data
team = ThreadTeam(4)
signal.signal(signal.SIGALRM, interrupt)
interrupts = 0
while interrupts < 300 or counters[0, 0] <= 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 5e-4))
        while True:
            team.run_kernel(count_step, op)
    except Interrupt:
        interrupts += 1
    # Whole steps, or none: every thread has taken part in all of them.
    assert len(set(counters[:, 0].tolist())) == 1, counters[:, 0]
team.close()
print("done")
"""


def test_a_caller_who_is_interrupted_leaves_no_step_half_done() -> None:
    """A signal raises an exception at any point of a run, as Ctrl-C does. Otherwise closing would hang."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
