"""Sizes of feed-forward networks: of a layer's only one, or of one beside experts."""

import math
from dataclasses import dataclass

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.metadata import MetadataArray
from models.sizes import experts, scan
from models.sizes.experts import ExpertSizes
from models.sizes.reading import MAX_WIDTH, in_each_layer

ALL_COUNT = float("-inf")
"""The sparsity threshold that keeps every gate."""
_DENSE = "ffn_up.weight"
_WITH_XIELU, _XIELU = ("apertus",), "xielu"  # the keys of its factors have no architecture prefix
# Default for Gemma 3n files that do not state it: the first ten layers keep the largest 5 % of gates.
_SPARSE = {"gemma3n": (10, 1.6448533535003662)}


@dataclass(frozen=True)
class FeedForwardSizes:
    """Of all layers."""

    # Each layer's width, 0 if the layer has no such network; empty if none has.
    widths: tuple[int, ...]
    # The activation's name in the file, or empty.
    activation: str
    # For each layer, how many standard deviations above the mean a gate must be to be kept, -inf to keep all.
    sparsity: tuple[float, ...]
    # Each layer's xIELU factors, if that is the activation.
    xielu: tuple[tuple[float, ...], ...]


def read(file: ModelFile, layers: int, mixture: ExpertSizes | None) -> FeedForwardSizes:
    """Read the sizes. mixture: the file's experts. Raises ModelFileError for a missing or out-of-range key."""
    name = file.architecture
    dense = (
        mixture is None
        or not all(mixture.layers)
        or name in scan.ALONE
        or experts.first_prefix(file, layers) + _DENSE in file.tensors
    )
    narrowest = 0 if name in scan.SCANS else 1
    widths = in_each_layer(file, f"{name}.feed_forward_length", MAX_WIDTH, layers, narrowest)[:layers] if dense else ()
    activation = file.metadata.get_str(f"{name}.hidden_activation", "")
    xielu = _xielu(file, layers) if name in _WITH_XIELU else ()
    return FeedForwardSizes(widths, activation, _sparsity(file, layers), xielu)


def _sparsity(file: ModelFile, layers: int) -> tuple[float, ...]:
    """For each layer, how many standard deviations above the mean a gate must be to be kept; -inf keeps all."""
    key = f"{file.architecture}.activation_sparsity_scale"
    if key in file.metadata:
        return tuple(file.metadata.get_list(key, float, length=layers))
    count, deviations = _SPARSE.get(file.architecture, (0, 0.0))
    return (deviations,) * min(count, layers) + (ALL_COUNT,) * (layers - count)


def _xielu(file: ModelFile, layers: int) -> tuple[tuple[float, ...], ...]:
    """Each layer's xIELU factors as cpu_kernels.activations takes them.

    Files state the factors once or once per layer; alphas are the softplus of the stated values. Raises ModelFileError
    for a key that is missing or not finite.
    """
    stated = (_factors(file, name, layers) for name in ("alpha_n", "alpha_p", "beta", "eps"))
    return tuple((beta + _softplus(n), _softplus(p), beta, eps) for n, p, beta, eps in zip(*stated, strict=True))


def _factors(file: ModelFile, name: str, layers: int) -> list[float]:
    key = f"{_XIELU}.{name}"
    if not isinstance(file.metadata.get(key), MetadataArray):
        return [file.metadata.get_float(key)] * layers
    values = file.metadata.get_list(key, float, length=layers)
    if not all(map(math.isfinite, values)):
        raise ModelFileError(f"{file.path}: {key} has a value that is not a number. Use another version of the model.")
    return values


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
