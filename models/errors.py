"""Errors of loading a model into the native engine, and checks for metadata and tensors that it would ignore.

A file that asks for anything the native engine does not compute is refused, because its results would silently differ.
llama.cpp ignores, for these architectures, every other key that is not read here.
"""

import contextlib
from collections.abc import Iterable, Iterator

from cpu_kernels.compile_children import KernelError
from gguf_io import ModelFile
from gguf_io.errors import LocalLLMError

TWO_SIZES = ("gemma4", "laguna")
"""Architectures whose sliding-window layers may have another head size, or rotate another part of a head."""
# Arrays for multi-dimensional positions, and for layers that take images.
_SECTIONS = "rope.dimension_sections"
_SAME_IN_TEXT = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
_DEEP_IMAGES = "deepstack_mapping"
# Head sizes of sliding-window layers, and the keys whose values they must equal.
_LOCAL_SIZES = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "rope.dimension_count_swa": "rope.dimension_count",
}
# Tensors that may stay unused: rotation factors for the other context length.
_CHOSEN_BETWEEN = ("rope_factors_long.weight", "rope_factors_short.weight")


class UnsupportedModelError(LocalLLMError):
    """An architecture, tensor type or option that the native engine does not compute. The message names it."""


@contextlib.contextmanager
def kernels_needed() -> Iterator[None]:
    """Raise UnsupportedModelError if a kernel cannot be compiled."""
    try:
        yield
    except KernelError as error:
        raise UnsupportedModelError(str(error)) from error


def refuse_unread(file: ModelFile) -> None:
    """Raise UnsupportedModelError for metadata that requires something the native engine does not compute."""
    metadata, name = file.metadata, file.architecture
    if (step := metadata.get(f"{name}.interleave_moe_layer_step", 1)) != 1:
        raise refusal(file, f"{name}.interleave_moe_layer_step is {step}")
    for key, other in _LOCAL_SIZES.items():
        value = metadata.get(f"{name}.{key}")
        if name not in TWO_SIZES and value is not None and value != metadata.get(f"{name}.{other}", value):
            raise refusal(file, f"{name}.{key} is {value} and differs from {other}")
    # For text, the first three components of a position are equal and the fourth is 0.
    sections = _integers(file, _SECTIONS)
    if any(sections[3:] if name in _SAME_IN_TEXT else sections):
        raise refusal(file, f"{name}.{_SECTIONS} uses multi-dimensional positions")
    if any(layer >= 0 for layer in _integers(file, _DEEP_IMAGES)):
        raise refusal(file, f"{name}.{_DEEP_IMAGES} feeds images into several layers")


def refuse_unused(file: ModelFile, used: Iterable[str], layers: int, layer: int | None = None) -> None:
    """Raise UnsupportedModelError for tensors that a program does not use: ignoring them would change its results.

    layers: how many are computed; tensors of later layers, which draft tokens, may stay unused. layer: check only this
    layer's tensors, since later ones are not loaded yet.
    """
    left = set(file.tensors).difference(used, _CHOSEN_BETWEEN)
    if layer is not None:
        left = {tensor for tensor in left if tensor.startswith(f"blk.{layer}.")}
    left -= {tensor for tensor in left if _layer_of(tensor) >= layers}
    if left:
        names = sorted(left)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise refusal(file, f"the tensor {names[0]}{more} would not be used")


def _integers(file: ModelFile, key: str) -> list[int]:
    """An integer array of the metadata, empty if the file has none."""
    key = f"{file.architecture}.{key}"
    return file.metadata.get_list(key, int) if key in file.metadata else []


def _layer_of(tensor: str) -> int:
    """The layer that a tensor belongs to, -1 for none."""
    first, _, rest = tensor.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "blk" and number.isdecimal() else -1


def refusal(file: ModelFile, problem: str) -> UnsupportedModelError:
    """The error for a file that needs something the native engine does not compute."""
    return UnsupportedModelError(
        f"{file.path}: {problem}, which the native engine does not support. llama.cpp may: use --backend llama."
    )
