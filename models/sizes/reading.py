"""Limits that sizes of several kinds of layers share, and how numbers are read from a header."""

from cpu_kernels.kv_types import PAGE_TOKENS
from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.metadata import MetadataArray
from models.errors import UnsupportedModelError

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_SIZE = 512
MAX_CONTEXT = 1 << 24
MAX_VOCABULARY = 1 << 22


def whole_vectors(values: int, multiple: int = 16) -> int:
    """Values rounded up to a multiple."""
    return -(-values // multiple) * multiple


def convolution_reach(file: ModelFile, key: str) -> int:
    """Rows that a convolution reads, the row's own included. It reaches back at most one page."""
    return file.metadata.get_int(f"{file.architecture}.{key}", minimum=2, maximum=PAGE_TOKENS + 1)


def same_in_all_layers(file: ModelFile, key: str, maximum: int) -> int:
    """A number that the file states once, or once per layer. Raises UnsupportedModelError if layers differ."""
    values = set(in_each_layer(file, key, maximum, 1))
    if len(values) != 1:
        raise UnsupportedModelError(
            f"{file.path}: {key} differs between layers, which the native engine does not support.",
            remedy="Use --backend llama.",
        )
    return values.pop()


def in_each_layer(file: ModelFile, key: str, maximum: int, layers: int, minimum: int = 1) -> tuple[int, ...]:
    """A number for each layer, which the file states once or once per layer. Raises ModelFileError if out of range."""
    if not isinstance(file.metadata.get(key), MetadataArray):
        return (file.metadata.get_int(key, minimum=minimum, maximum=maximum),) * layers
    values = tuple(file.metadata.get_list(key, int))
    for value in values:
        if not minimum <= value <= maximum:
            raise ModelFileError(
                f"{file.path}: {key} is {value}, outside {minimum}..{maximum}. Use another version of the model."
            )
    if len(values) < layers:
        raise ModelFileError(
            f"{file.path}: {key} has {len(values)} numbers for {layers} layers. Use another version of the model."
        )
    return values


def stated_number(file: ModelFile, key: str, maximum: float = 1e6, least: float = 0.0) -> float | None:
    """A non-negative number that the file states, else None. Raises ModelFileError if it is out of range.

    least: the smallest value accepted other than 0, since dividing by a smaller one would overflow.
    """
    key = f"{file.architecture}.{key}"
    if key not in file.metadata:
        return None
    stated = file.metadata.get_float(key, minimum=0.0, maximum=maximum)
    return file.metadata.get_float(key, minimum=least, maximum=maximum) if stated else stated


def rows_of(file: ModelFile, name: str, *, required: bool = False) -> int:
    """Rows of a matrix, 0 if the file has none and it is not required. Raises UnsupportedModelError."""
    tensor = file.tensors.get(name)
    if tensor is None and not required:
        return 0
    if tensor is None or len(tensor.shape) != 2 or not 1 <= tensor.shape[0] <= MAX_VOCABULARY:
        raise UnsupportedModelError(
            f"{file.path}: the tensor {name} is missing or has an unusable shape. Use another version of the model."
        )
    return tensor.shape[0]
