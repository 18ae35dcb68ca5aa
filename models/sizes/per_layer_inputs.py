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
    metadata, name = file.metadata, file.architecture
    norm, projection = file.tensors.get(_NORM), file.tensors.get(_STREAMS)
    width = norm.shape[0] if norm else 0
    key = f"{name}.embedding_length_per_layer_input"
    if metadata.get_int(key, width, maximum=MAX_WIDTH) != width:
        raise ModelFileError(
            f"{file.path}: {key} is {metadata[key]}, but the per-layer embedding tensors are {width} wide. "
            "Use another version of the model."
        )
    streams = projection.shape[0] + 1 if projection and len(projection.shape) == 3 else 1
    key = f"{name}.altup.num_inputs"
    if metadata.get_int(key, streams) != streams:
        raise ModelFileError(
            f"{file.path}: {key} does not fit the tensor {_STREAMS}, which is for {streams} streams. "
            "Use another version of the model."
        )
    return PerLayerSizes(width, streams, metadata.get_int(f"{name}.altup.active_idx", 0, maximum=streams - 1))
