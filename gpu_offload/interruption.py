"""Ending a computation of llama.cpp early, from another thread."""

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_offload.library import llama


@contextmanager
def heeding(context: Any, stop: NDArray[np.uint8]) -> Iterator[None]:
    """Have llama_decode fail soon after stop[0] is no longer 0. stop: two bytes, the second always 0.

    llama.cpp asks between the operations of a graph, and only where a processor computes them.
    """
    library = llama()
    library.llama_set_abort_callback(context, _is_set(), stop.ctypes.data)
    try:
        yield
    finally:
        library.llama_set_abort_callback(context, library.ggml_abort_callback(), None)


@functools.cache
def _is_set() -> Any:
    """A ggml_abort_callback that says whether the byte that it is given an address of is not 0.

    It is called a thousand times a step by the thread that computes, where taking Python's lock each time would cost
    more than the step. C's strlen of the byte and the 0 after it says the same without Python.
    """
    library = ctypes.CDLL("msvcrt") if sys.platform == "win32" else ctypes.CDLL(None)
    return ctypes.cast(library.strlen, llama().ggml_abort_callback)
