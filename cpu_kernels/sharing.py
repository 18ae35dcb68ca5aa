"""Divides an operation's items among threads of uneven speed: a fixed part for each, and the rest on demand.

Each thread first computes a contiguous run of items of its own. The last quarter of all items is divided into pieces
that threads take when they finish, so that a core slowed down by other programs delays the others by at most one piece.
Each piece starts with a memory stall, so there are few, and the last ones are the smallest. An item's result must not
depend on the thread that computes it.

    first, last = first_share(count, thread, threads)
    while first >= 0:
        ... items first..last-1
        first, last = next_share(op, count, threads)
"""

from cpu_kernels.declarations import inner
from cpu_kernels.records import Op, share
from cpu_kernels.simd.threads import atomic_add, atomic_store

_PIECES_A_THREAD = 3
_FREE = 4
"""One in _FREE items goes to pieces; the threads' own parts divide the rest."""


@inner
def first_share(count: int, thread: int, threads: int) -> tuple[int, int]:
    """The items first..last-1 of a thread's fixed part."""
    own = count - count // _FREE
    return share(own, thread, threads), share(own, thread + 1, threads)


@inner
def next_share(op: int, count: int, threads: int) -> tuple[int, int]:
    """Take a piece, items first..last-1, for the calling thread; returns (-1, -1) when none are left.

    Every thread must call this until it gets (-1, -1): the last one to do so resets the counter for the next step.
    """
    rest = count // _FREE
    pieces = min(rest, _PIECES_A_THREAD * threads)
    taken = atomic_add(op + 8 * Op.TAKEN, 1)
    if taken == pieces + threads - 1:
        atomic_store(op + 8 * Op.TAKEN, 0)
    first, last = -1, -1
    if taken < pieces:
        left, all_squared = pieces - taken, pieces * pieces
        first = count - rest * left * left // all_squared
        last = count - rest * (left - 1) * (left - 1) // all_squared
    return first, last
