"""On machines with several memory nodes, memory belongs to the node of the thread that writes to it first.

Weights are packed in portions, each by all threads. So their memory is touched before, by the threads that will read
it: the same runs of groups as in a product (cpu_kernels.sharing).
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.cores import listed
from cpu_kernels.kernel import kernel
from cpu_kernels.program import operation_of
from cpu_kernels.records import argument, share
from cpu_kernels.simd.vectors import put_u8
from cpu_kernels.threads import ThreadTeam

_PAGE_BYTES = 4096


class TouchGroups(Arguments):
    """Arguments of touch_groups."""

    packed: int  # groups of rows
    groups: int  # number of groups
    group_bytes: int  # bytes of a group


_TOUCH = indices_of(TouchGroups)


@kernel(TouchGroups)
def touch_groups(op: int, step: int, thread: int, threads: int) -> None:
    """Write a zero to each page of the thread's groups."""
    packed, groups, group_bytes = (
        argument(op, _TOUCH.packed),
        argument(op, _TOUCH.groups),
        argument(op, _TOUCH.group_bytes),
    )
    begin = packed + share(groups, thread, threads) * group_bytes
    end = packed + share(groups, thread + 1, threads) * group_bytes
    for where in range(begin, end, _PAGE_BYTES):
        put_u8(where, 0)


def memory_nodes(online: Path = Path("/sys/devices/system/node/online")) -> int:
    """Number of memory nodes; 1 if the system does not report them."""
    return max(1, len(listed(online)))


def touch(team: ThreadTeam, packed: NDArray[np.generic], group_bytes: int) -> None:
    """Let each thread touch its groups of a matrix that is not packed yet, if the machine has several memory nodes."""
    if memory_nodes() == 1 or team.threads == 1:
        return
    arguments = TouchGroups(packed=packed.ctypes.data, groups=packed.nbytes // group_bytes, group_bytes=group_bytes)
    team.run_kernel(touch_groups, operation_of(touch_groups, arguments))
