"""Divides an operation's items among threads of uneven speed: each has its own run, of which idle threads take half.

A thread takes its own items from the front, an eighth of what is left at a time. One that has finished takes the rear
half of the longest run left. So threads of equal speed stay in their runs, which are the same in every step, and read
memory in order; a core that is slow, or that another program uses, delays the others by a few items. An item's result
must not depend on the thread that computes it.

    first, last = first_share(op, step, count, thread, threads)
    while first >= 0:
        ... items first..last-1
        first, last = next_share(op, step, count, thread, threads)

An operation does this once in a step. What is left of a thread's run is one integer in a cache line of its own: the
step's turn (Step.TURN), the first item and the end. A line of another turn means that nobody has taken items of this
run. The program sets the lines to zero before turns repeat (cpu_kernels.program). Without lines, threads have their
whole runs at once.
"""

from cpu_kernels.declarations import inner
from cpu_kernels.records import Op, Step, field, share
from cpu_kernels.simd.threads import atomic_load, atomic_store, compare_and_swap

LINE_BYTES = 64
TURNS = 1 << 20
"""Turns are below it, and not 0."""
_BITS = 21
_MOST_ITEMS = (1 << _BITS) - 1
# A thread takes one in _PART of its items at a time, but not less than one in _LEAST of a thread's fair share.
_PART, _LEAST = 8, 48


@inner
def _run_word(turn: int, first: int, end: int) -> int:
    return turn << (2 * _BITS) | first << _BITS | end


@inner
def _run_left(word: int, turn: int, count: int, thread: int, threads: int) -> tuple[int, int]:
    """The items first..end-1 that are left of a thread's run."""
    if word >> (2 * _BITS) == turn:
        return word >> _BITS & _MOST_ITEMS, word & _MOST_ITEMS
    return share(count, thread, threads), share(count, thread + 1, threads)


@inner
def _longest_run(lines: int, turn: int, count: int, threads: int) -> tuple[int, int, int, int]:
    """The thread with the most items left, its word, and its items; (-1, 0, 0, 0) if none are left."""
    found, found_word, found_first, found_end = -1, 0, 0, 0
    for other in range(threads):
        word = atomic_load(lines + other * LINE_BYTES)
        first, end = _run_left(word, turn, count, other, threads)
        if end - first > found_end - found_first:
            found, found_word, found_first, found_end = other, word, first, end
    return found, found_word, found_first, found_end


@inner
def first_share(op: int, step: int, count: int, thread: int, threads: int) -> tuple[int, int]:
    """Take the first items, first..last-1, for the calling thread; (-1, -1) if there are none."""
    if field(op, Op.LINES) == 0 or threads == 1 or count > _MOST_ITEMS:
        return share(count, thread, threads), share(count, thread + 1, threads)
    return next_share(op, step, count, thread, threads)


@inner
def next_share(op: int, step: int, count: int, thread: int, threads: int) -> tuple[int, int]:
    """Take more items, first..last-1, for the calling thread; (-1, -1) if none are left."""
    lines, turn = field(op, Op.LINES), field(step, Step.TURN)
    if lines == 0 or threads == 1 or count > _MOST_ITEMS:
        return -1, -1
    own = lines + thread * LINE_BYTES
    least = 1 + count // (_LEAST * threads)
    taken, taken_end = -1, -1
    searching = True
    while searching:
        word = atomic_load(own)
        first, end = _run_left(word, turn, count, thread, threads)
        if first < end:
            middle = min(end, first + max(least, (end - first) // _PART))
            if compare_and_swap(own, word, _run_word(turn, middle, end)):
                taken, taken_end = first, middle
                searching = False
        else:
            other, word, first, end = _longest_run(lines, turn, count, threads)
            middle = (first + end) // 2
            if other < 0:
                searching = False
            elif compare_and_swap(lines + other * LINE_BYTES, word, _run_word(turn, first, middle)):
                atomic_store(own, _run_word(turn, middle, end))
    return taken, taken_end
