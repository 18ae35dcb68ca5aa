"""Errors of loading a model into the native engine."""

import contextlib
from collections.abc import Iterator

from cpu_kernels.compile_children import KernelError
from gguf_io.errors import LocalLLMError


class UnsupportedModelError(LocalLLMError):
    """An architecture, tensor type or option that the native engine does not compute. Names what it met."""


@contextlib.contextmanager
def kernels_needed() -> Iterator[None]:
    """Raise UnsupportedModelError where a kernel could not be compiled."""
    try:
        yield
    except KernelError as error:
        raise UnsupportedModelError(str(error)) from error
