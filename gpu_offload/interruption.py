"""Ending a computation of llama.cpp early, from another thread."""

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpu_offload.library import llama

_LOOK_S = 0.005


@contextmanager
def interruptible(context: Any, stop: threading.Event) -> Iterator[None]:
    """Have llama_decode fail soon after another thread has set `stop`.

    llama.cpp asks between the operations of a graph, and only where a processor computes them. It asks a thousand times
    a step, on the thread that computes, where taking Python's lock each time would cost more than the step. So it reads
    a byte, which a thread sets that looks at the event every 5 ms.
    """
    library = llama()
    flag, ended = np.zeros(2, np.uint8), threading.Event()
    flag[0] = stop.is_set()

    def watch() -> None:
        while not (flag[0] or ended.wait(_LOOK_S)):
            flag[0] = stop.is_set()

    watcher = threading.Thread(target=watch, name="llama.cpp-stop", daemon=True)
    watcher.start()
    library.llama_set_abort_callback(context, _is_set(), flag.ctypes.data)
    try:
        yield
    finally:
        library.llama_set_abort_callback(context, library.ggml_abort_callback(), None)
        ended.set()
        watcher.join()


@functools.cache
def _is_set() -> Any:
    """A ggml_abort_callback that says whether a byte is not 0: C's strlen of the byte and the 0 behind it."""
    library = ctypes.CDLL("msvcrt") if sys.platform == "win32" else ctypes.CDLL(None)
    return ctypes.cast(library.strlen, llama().ggml_abort_callback)
