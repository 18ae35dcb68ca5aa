"""Sharing of items among threads: each item is computed once per step, and a slow thread delays the others little."""

import heapq
from collections.abc import Sequence

import numpy as np
import pytest

from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.kernel import kernel
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.program import ProgramBuilder
from cpu_kernels.records import Barrier, Op, Step, argument
from cpu_kernels.sharing import LINE_BYTES, first_share, next_share
from cpu_kernels.simd.threads import atomic_add, pause
from cpu_kernels.simd.vectors import get_i64, put_i64
from cpu_kernels.threads import ThreadTeam


class CountItems(Arguments):
    """Arguments of count_items."""

    counters: int  # int64, one for each item
    items: int
    by_thread: int  # a line of 64 bytes for each thread: how many items it took
    slow: int  # a thread, -1 for none


_AT = indices_of(CountItems)


@kernel(CountItems)
def count_items(op: int, step: int, thread: int, threads: int) -> None:
    """Add one to each item's counter."""
    count = argument(op, _AT.items)
    first, last = first_share(op, step, count, thread, threads)
    while first >= 0:
        for item in range(first, last):
            atomic_add(argument(op, _AT.counters) + 8 * item, 1)
            if thread == argument(op, _AT.slow):
                for _ in range(20_000):
                    pause()
        mine = argument(op, _AT.by_thread) + 64 * thread
        put_i64(mine, get_i64(mine) + last - first)
        first, last = next_share(op, step, count, thread, threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 100])
def test_every_item_is_computed_once_in_every_step(threads: int, count: int) -> None:
    """Two operations follow each other without a barrier, so a late thread may still have items of the first one."""
    counters = aligned_zeros((2, count + 1), np.int64)
    by_thread = aligned_zeros((2, threads, 8), np.int64)
    builder = ProgramBuilder()
    for each, slow in ((0, 0), (1, threads - 1)):
        addresses = {"counters": counters[each].ctypes.data, "by_thread": by_thread[each].ctypes.data}
        builder.add(count_items, CountItems(items=count, slow=slow, **addresses), barrier=Barrier.NEVER)
    program, step = builder.build(), aligned_zeros((int(Step.SIZE),), np.int64)
    team = ThreadTeam(threads)
    try:
        for done in range(1, 6):
            program.run(team, step.ctypes.data)
            assert counters.tolist() == [[done] * count + [0]] * 2
    finally:
        team.close()
    assert by_thread[:, :, 0].sum(axis=1).tolist() == [5 * count] * 2


def test_turns_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last turn the lines are cleared, or what a thread did under the same number would count again."""
    monkeypatch.setattr("cpu_kernels.program.TURNS", 3)
    counters, by_thread = aligned_zeros((50,), np.int64), aligned_zeros((2, 8), np.int64)
    builder = ProgramBuilder()
    arguments = CountItems(counters=counters.ctypes.data, items=0, by_thread=by_thread.ctypes.data, slow=-1)
    index = builder.add(count_items, arguments, barrier=Barrier.ALWAYS)
    program, step = builder.build(), aligned_zeros((int(Step.SIZE),), np.int64)
    team = ThreadTeam(2)
    try:
        for done, count in enumerate((50, 0, 50, 50, 7, 50), start=1):
            program.set_argument(index, _AT.items, count)
            counters[:] = 0
            program.run(team, step.ctypes.data)
            assert counters.tolist() == [1] * count + [0] * (50 - count), done
    finally:
        team.close()


def schedule(count: int, speeds: Sequence[float]) -> tuple[float, list[list[int]]]:
    """Let threads of these speeds, in items per second, share items; returns the seconds, and each thread's items."""
    lines = aligned_zeros((len(speeds) * LINE_BYTES // 8,), np.int64)
    op, step = aligned_zeros((int(Op.SIZE),), np.int64), aligned_zeros((int(Step.SIZE),), np.int64)
    op[Op.LINES], step[Step.TURN] = lines.ctypes.data, 5
    items: list[list[int]] = [[] for _ in speeds]
    queue, end = [(0.0, thread, first_share) for thread in range(len(speeds))], 0.0
    while queue:
        now, thread, take = heapq.heappop(queue)
        first, last = take(op.ctypes.data, step.ctypes.data, count, thread, len(speeds))
        if first < 0:
            end = max(end, now)
            continue
        items[thread] += range(first, last)
        heapq.heappush(queue, (now + (last - first) / speeds[thread], thread, next_share))
    return end, items


# Speeds of processors with unequal cores, relative to their fastest.
UNEQUAL = {
    "4 + 4 at a third": [1.0] * 4 + [0.33] * 4,
    "4 + 6 at two fifths": [1.0] * 4 + [0.4] * 6,
    "8 + 2 at a third": [1.0] * 8 + [0.33] * 2,
    "4 + 8 at half": [1.0] * 4 + [0.5] * 8,
    "8 + 16 at half": [1.0] * 8 + [0.5] * 16,
    "6 + 8 + 2 of three kinds": [1.0] * 6 + [0.55] * 8 + [0.3] * 2,
    "1 + 3 + 4 of three kinds": [1.0] + [0.75] * 3 + [0.3] * 4,
    "2, one of them at half": [1.0, 0.5],
    "8, one of them at half": [1.0] * 7 + [0.5],
    "64 equal ones": [1.0] * 64,
}


@pytest.mark.parametrize("speeds", UNEQUAL.values(), ids=UNEQUAL)
@pytest.mark.parametrize("count", [192, 1536])
def test_a_slow_core_costs_its_share(speeds: list[float], count: int) -> None:
    seconds, items = schedule(count, speeds)
    assert sorted(item for each in items for item in each) == list(range(count))
    assert seconds <= 1.1 * count / sum(speeds)


@pytest.mark.parametrize("threads", [2, 4, 16])
def test_equal_cores_stay_in_their_runs(threads: int) -> None:
    """So each reads memory in order, and the same items in every step."""
    _, items = schedule(1536, [1.0] * threads)
    fair = 1536 // threads
    assert items == [list(range(fair * thread, fair * (thread + 1))) for thread in range(threads)]


def test_a_stalled_core_keeps_few_items() -> None:
    seconds, items = schedule(1536, [1.0] * 7 + [0.01])
    assert len(items[-1]) <= 1536 / 8 / 8 + 1
    assert seconds <= len(items[-1]) / 0.01 + 1
