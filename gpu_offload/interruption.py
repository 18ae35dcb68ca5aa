"""Cancels a llama.cpp computation from another thread."""

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpu_offload.library import llama

_POLL_S = 0.005


@contextmanager
def interruptible(context: Any, stop: threading.Event) -> Iterator[None]:
    """Make llama_decode fail soon after another thread sets `stop`; works only where the CPU computes.

    llama.cpp calls its abort callback between the operations of a graph, a thousand times a step. A Python callback
    would cost more than the step, so the callback reads a byte, set by a thread that polls the event.
    """
    library = llama()
    flag, ended = np.zeros(2, np.uint8), threading.Event()
    flag[0] = stop.is_set()

    def watch() -> None:
        while not (flag[0] or ended.wait(_POLL_S)):
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
    """Return a ggml_abort_callback in C: strlen of the byte and the 0 after it is 1 once the byte is set."""
    library = ctypes.CDLL("msvcrt") if sys.platform == "win32" else ctypes.CDLL(None)
    return ctypes.cast(library.strlen, llama().ggml_abort_callback)
