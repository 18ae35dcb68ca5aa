"""Compiling kernels in several processes.

Numba and LLVM compile one function at a time in a process, a model's kernels take seconds, and LLVM ends the process
where one of its assertions fails. So kernels that are not in the cache are shared out among child processes, which
leave them there. What a child does not finish is compiled here.
"""

import contextlib
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from cpu_kernels.cores import usable_cores
from cpu_kernels.kernel import Kernel, find_kernel
from cpu_kernels.kernel_cache import cache_directory, cache_works

CompileProgress = Callable[[int, int, str], None]
"""Called with kernels done, kernels in all, and the name of the next one."""

# Importing Numba takes a child as long as compiling two kernels.
_KERNELS_PER_CHILD = 3
_WAIT_S = 0.1
_CHILD = "import sys; sys.path[:] = sys.argv[2:]; from cpu_kernels.parallel_compile import serve; serve(sys.argv[1])"


def compile_all(kernels: Sequence[Kernel], progress: CompileProgress | None = None) -> None:
    """Load the kernels from the cache, or compile them.

    progress may raise to end it: the children are killed, and what they finished stays in the cache. Raises
    KernelError.
    """
    missing = [kernel for kernel in kernels if not kernel.load()]
    # Attention takes as long as all others together.
    queue = deque(sorted(missing, key=lambda kernel: not kernel.name.startswith("attention.")))

    def show(left: int, name: str = "") -> None:
        if progress is not None:
            progress(len(kernels) - left, len(kernels), name)

    with _children(queue) as workers:
        while alive := sum(worker.is_alive() for worker in workers):
            show(len(queue) + alive)
            time.sleep(_WAIT_S)
    for kernel in missing:
        if not kernel.load():  # a child failed
            show(sum(not each.is_ready for each in missing), kernel.name)
            kernel.compile()
    show(0)


@contextlib.contextmanager
def _children(queue: deque[Kernel]) -> Iterator[list[threading.Thread]]:
    """Start children that take kernels from the queue; kill them at the end. Yields the threads that wait for them."""
    count = min(usable_cores(), -(-len(queue) // _KERNELS_PER_CHILD)) if cache_works() else 0
    with contextlib.ExitStack() as stack:
        workers = []
        for _ in range(count):
            child = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-I", "-c", _CHILD, cache_directory().name, *sys.path],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,  # what goes wrong there goes wrong here again
                    text=True,
                    bufsize=1,
                )
            )
            stack.callback(child.kill)
            workers.append(threading.Thread(target=_feed, args=(child, queue), daemon=True))
            workers[-1].start()
        yield workers


def _feed(child: subprocess.Popen[str], queue: deque[Kernel]) -> None:
    """Give a child one kernel after another until none is left or the child ends."""
    assert child.stdin is not None and child.stdout is not None
    with contextlib.suppress(IndexError, OSError, ValueError):
        while child.stdout.readline():
            child.stdin.write(f"{queue.popleft().name}\n")


def serve(folder: str) -> None:
    """Compile kernels whose names come on standard input into the cache folder of this name; a line for each."""
    from cpu_kernels import activations, attention, experts, kv_store, norms, sums  # noqa: F401 - they declare
    from cpu_kernels.attention_shape import WIDTHS
    from cpu_kernels.formats import table  # noqa: F401 - as above
    from cpu_kernels.kv_types import KVType

    if cache_directory().name != folder:  # the parent was told otherwise by more than its environment
        return
    for keys, values, group in product(KVType, KVType, WIDTHS):
        attention.attention_kernel(keys, values, group)
    sys.stdout.write("\n")
    sys.stdout.flush()
    for line in sys.stdin:
        find_kernel(line.strip()).compile()
        sys.stdout.write("\n")
        sys.stdout.flush()
