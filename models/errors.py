"""Errors of loading a model into the native engine, and a check for metadata that it would ignore.

A file that asks for anything the native engine does not compute is refused, because its results would silently differ.
llama.cpp ignores, for these architectures, every other key that is not read here.
"""

import contextlib
from collections.abc import Iterator

from cpu_kernels.compile_children import KernelError
from gguf_io import ModelFile
from gguf_io.errors import LocalLLMError

TWO_SIZES = ("gemma4", "laguna")
"""Architectures whose sliding-window layers may have another head size, or rotate another part of a head."""
# Arrays for multi-dimensional positions, and for layers that take images.
SECTIONS = "rope.dimension_sections"
_SAME_IN_TEXT = ("qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
_DEEP_IMAGES = "deepstack_mapping"
# Head sizes of sliding-window layers, and the keys whose values they must equal.
_LOCAL_SIZES = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "rope.dimension_count_swa": "rope.dimension_count",
}


class UnsupportedModelError(LocalLLMError):
    """An architecture, tensor type or option that the native engine does not compute. The message names it."""


@contextlib.contextmanager
def kernels_needed() -> Iterator[None]:
    """Raise UnsupportedModelError if a kernel cannot be compiled."""
    try:
        yield
    except KernelError as error:
        raise UnsupportedModelError(error.message, remedy=error.remedy) from error


def refuse_unread(file: ModelFile) -> None:
    """Raise UnsupportedModelError for metadata that requires something the native engine does not compute."""
    metadata, name = file.metadata, file.architecture
    if name != "llama4" and (step := metadata.get(f"{name}.interleave_moe_layer_step", 1)) != 1:
        raise refusal(file, f"{name}.interleave_moe_layer_step is {step}")
    for key, other in _LOCAL_SIZES.items():
        value = metadata.get(f"{name}.{key}")
        if name not in TWO_SIZES and value is not None and value != metadata.get(f"{name}.{other}", value):
            raise refusal(file, f"{name}.{key} is {value} and differs from {other}")
    # For text, the first three components of a position are equal and the fourth is 0.
    sections = integers(file, SECTIONS)
    if any(sections[3:] if name in _SAME_IN_TEXT else sections):
        raise refusal(file, f"{name}.{SECTIONS} uses multi-dimensional positions")
    if max(integers(file, _DEEP_IMAGES), default=-1) >= 0:
        raise refusal(file, f"{name}.{_DEEP_IMAGES} feeds images into several layers")


def integers(file: ModelFile, key: str) -> list[int]:
    """An integer array of the architecture's metadata, empty if the file has none."""
    key = f"{file.architecture}.{key}"
    return file.metadata.get_list(key, int) if key in file.metadata else []


def refusal(file: ModelFile, problem: str) -> UnsupportedModelError:
    """The error for a file that needs something the native engine does not compute."""
    return UnsupportedModelError(
        f"{file.path}: {problem}, which the native engine does not support.",
        remedy="llama.cpp may: use --backend llama.",
    )
