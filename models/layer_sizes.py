"""What differs between the layers of a model: their heads, whose keys and values they read, and their widths."""

from dataclasses import dataclass

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.metadata import MetadataArray
from models.errors import UnsupportedModelError

MAX_HEADS = 4096
MAX_HEAD_SIZE = 512
CONVOLUTION = "shortconv.l_cache"
TWO_SIZES = ("gemma4",)
"""Architectures whose layers with a window may have heads of another size."""
# Gemma 3n's files need not say that all layers from this one on share keys and values.
_SHARED_FROM = {"gemma3n": 20}
ALL_COUNT = float("-inf")
"""No gate is too small to count."""
# Nor which of them have active gates cut: the first ten, to the largest twentieth.
_SPARSE = {"gemma3n": (10, 1.6448533535003662)}


@dataclass(frozen=True)
class Heads:
    """Heads of a layer's attention: those of queries, those of keys and values, values of one, and how many turn.

    latent: values of a latent, which come before those that turn; 0 where heads have keys and values of their own.
    """

    queries: int
    keys: int
    size: int
    rope_size: int
    latent: int = 0

    @property
    def padded(self) -> int:
        """A head's values rounded up so that each half fills whole vectors: of a latent and what turns, each part."""
        return _padded(self.latent) + self.padded_turned

    @property
    def padded_turned(self) -> int:
        """The same of the values that are rotated together."""
        return _padded(self.size - self.latent)

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.queries // self.keys


def _padded(values: int) -> int:
    return -(-values // 32) * 32


def same_in_all_layers(file: ModelFile, key: str, maximum: int) -> int:
    """A number that the file states once, or once per layer; it must be the same in all of them."""
    values = set(in_each_layer(file, key, maximum, 1))
    if len(values) != 1:
        raise UnsupportedModelError(
            f"{file.path}: {key} differs between layers, which the native engine does not support. Use --backend llama."
        )
    return values.pop()


def in_each_layer(file: ModelFile, key: str, maximum: int, layers: int, minimum: int = 1) -> tuple[int, ...]:
    """A number for each layer, which the file states once or once per layer. Raises ModelFileError if it is absurd."""
    if not isinstance(file.metadata.get(key), MetadataArray):
        return (file.metadata.get_int(key, minimum=minimum, maximum=maximum),) * layers
    values = tuple(file.metadata.get_list(key, int))
    for value in values:
        if not minimum <= value <= maximum:
            raise ModelFileError(
                f"{file.path}: {key} is {value}, outside {minimum}..{maximum}. Get another edition of the model."
            )
    if len(values) < layers:
        raise ModelFileError(
            f"{file.path}: {key} has {len(values)} numbers for {layers} layers. Get another edition of the model."
        )
    return values


def layer_heads(
    file: ModelFile, heads: Heads, kv_heads: tuple[int, ...], windowed: tuple[bool, ...] | None
) -> tuple[Heads, ...]:
    """Each layer's heads. heads: of a layer that sees everything. kv_heads: of each layer, 0 where it does not attend.

    Raises UnsupportedModelError where heads do not fit together.
    """
    metadata, name = file.metadata, file.architecture
    size, turned = heads.size, heads.rope_size
    if name not in TWO_SIZES or windowed is None:
        windowed = (False,) * len(kv_heads)
    else:
        size = metadata.get_int(f"{name}.attention.key_length_swa", size, minimum=2, maximum=MAX_HEAD_SIZE)
        values = metadata.get_int(f"{name}.attention.value_length_swa", size, minimum=2, maximum=MAX_HEAD_SIZE)
        turned = metadata.get_int(f"{name}.rope.dimension_count_swa", min(turned, size), minimum=2, maximum=size)
        if values != size or size % 2 or turned % 2:
            raise UnsupportedModelError(
                f"{file.path}: heads of {size} (keys) and {values} (values) in layers with a window, of which {turned} "
                "turn: the native engine needs one even size. Use --backend llama."
            )
    found = []
    for layer, (stated, slides) in enumerate(zip(kv_heads, windowed, strict=True)):
        keys = stated or heads.keys
        if heads.queries % keys:
            raise UnsupportedModelError(
                f"{file.path}: {name}.attention.head_count_kv: {heads.queries} heads of layer {layer} cannot share "
                f"{keys} key-value heads."
            )
        of_layer = (size, turned) if slides else (heads.size, heads.rope_size)
        found.append(Heads(heads.queries, keys, *of_layer, heads.latent))
    return tuple(found)


def kv_layers(file: ModelFile, windowed: tuple[bool, ...] | None, layers: int) -> tuple[int, ...]:
    """For each layer, the one whose keys and values it reads.

    The last layers read those of the last layer before them that looks as far back: with a window, or without.
    """
    key = f"{file.architecture}.attention.shared_kv_layers"
    default = max(0, layers - _SHARED_FROM.get(file.architecture, layers))
    shared = file.metadata.get_int(key, default, maximum=layers - 1)
    own = layers - shared
    if shared and windowed is None:
        raise UnsupportedModelError(
            f"{file.path}: {file.architecture}.attention.sliding_window_pattern does not say which layers have a "
            "window, which the native engine needs to know of layers that share keys and values. Use --backend llama."
        )
    found = list(range(own))
    for layer in range(own, layers):
        alike = [other for other in range(own) if windowed and windowed[other] == windowed[layer]]
        if not alike:
            raise ModelFileError(
                f"{file.path}: {key} is {shared}, and layer {layer} finds no layer to share keys and values with. "
                "Get another edition of the model."
            )
        found.append(alike[-1])
    return tuple(found)


def kv_heads(file: ModelFile, key: str, layers: int) -> tuple[int, ...]:
    """Key-value heads of each layer, 0 for a short convolution. Raises UnsupportedModelError where none attends."""
    convolves = f"{file.architecture}.{CONVOLUTION}" in file.metadata
    counts = in_each_layer(file, key, MAX_HEADS, layers, 0 if convolves else 1)[:layers]
    if not any(counts):
        raise UnsupportedModelError(
            f"{file.path}: {key} gives no layer key-value heads, which the native engine needs. Use --backend llama."
        )
    return counts


def sparsity(file: ModelFile, layers: int) -> tuple[float, ...]:
    """For each layer, above how many standard deviations from their mean its gates count; -inf where all do."""
    key = f"{file.architecture}.activation_sparsity_scale"
    if key in file.metadata:
        return tuple(file.metadata.get_list(key, float, length=layers))
    count, deviations = _SPARSE.get(file.architecture, (0, 0.0))
    return tuple(deviations if layer < count else ALL_COUNT for layer in range(layers))
