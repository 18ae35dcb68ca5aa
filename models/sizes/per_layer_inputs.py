"""Sizes of the second embedding that gives each layer an input of its own (Gemma 3n and 4), and of parallel streams."""

from dataclasses import dataclass

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from models.sizes.reading import MAX_WIDTH

_NORM, _STREAMS = "per_layer_proj_norm.weight", "altup_proj.weight"


@dataclass(frozen=True)
class PerLayerSizes:
    """Of what a layer gets in addition to the residual stream."""

    # Values that a layer gets from each token's second embedding, 0 if there is none.
    width: int
    # Number of parallel residual streams, and the index of the one that layers compute with.
    streams: int
    active: int


def read(file: ModelFile) -> PerLayerSizes:
    """Read the sizes. Raises ModelFileError if metadata and tensors differ."""
    streams = _streams(file)
    active = file.metadata.get_int(f"{file.architecture}.altup.active_idx", 0, maximum=streams - 1)
    return PerLayerSizes(_width(file), streams, active)


def _width(file: ModelFile) -> int:
    norm = file.tensors.get(_NORM)
    width = norm.shape[0] if norm else 0
    key = f"{file.architecture}.embedding_length_per_layer_input"
    if file.metadata.get_int(key, width, maximum=MAX_WIDTH) != width:
        raise ModelFileError(
            f"{file.path}: {key} is {file.metadata[key]}, but the per-layer embedding tensors are {width} wide. "
            "Use another version of the model."
        )
    return width


def _streams(file: ModelFile) -> int:
    tensor = file.tensors.get(_STREAMS)
    streams = tensor.shape[0] + 1 if tensor and len(tensor.shape) == 3 else 1
    key = f"{file.architecture}.altup.num_inputs"
    if file.metadata.get_int(key, streams) != streams:
        raise ModelFileError(
            f"{file.path}: {key} does not fit the tensor {_STREAMS}, which is for {streams} streams. "
            "Use another version of the model."
        )
    return streams
