"""How threads share out an operation's items when no two run alike: a part for each, and the rest for who is early.

Each thread has a run of items of its own, one after the other in memory. The last quarter of them is cut into pieces
that are taken in turn, so that a core that somebody else wanted for a while holds the others up by a piece at most. A
piece that begins waits for memory once more, so there are few of them, and the last ones are the smallest. What an item
gives must not depend on who computes it.

    first, last = first_share(count, thread, threads)
    while first >= 0:
        ... items first..last-1
        first, last = next_share(op, count, threads)
"""

from cpu_kernels.declarations import inner
from cpu_kernels.records import Op, share
from cpu_kernels.simd.threads import atomic_add, atomic_store

_TAKEN = 8 * int(Op.TAKEN)
_PIECES_A_THREAD = 3
_FREE = 4
"""A thread's own part is that of all items but one in so many."""


@inner
def first_share(count: int, thread: int, threads: int) -> tuple[int, int]:
    """The items first..last-1 that are a thread's own."""
    own = count - count // _FREE
    return share(own, thread, threads), share(own, thread + 1, threads)


@inner
def next_share(op: int, count: int, threads: int) -> tuple[int, int]:
    """A piece, items first..last-1, that is from now on this thread's; (-1, -1) when there are none left.

    Every thread has to ask until then: the last one to be told so makes the record ready for the next step.
    """
    rest = count // _FREE
    pieces = min(rest, _PIECES_A_THREAD * threads)
    taken = atomic_add(op + _TAKEN, 1)
    if taken == pieces + threads - 1:
        atomic_store(op + _TAKEN, 0)
    first, last = -1, -1
    if taken < pieces:
        left, all_squared = pieces - taken, pieces * pieces
        first = count - rest * left * left // all_squared
        last = count - rest * (left - 1) * (left - 1) // all_squared
    return first, last
