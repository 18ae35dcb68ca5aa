"""Sizes of gated delta networks (Qwen 3.5), under the keys of state-space models."""

from dataclasses import dataclass

from gguf_io import ModelFile
from models.errors import UnsupportedModelError
from models.sizes.reading import MAX_HEAD_SIZE, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, convolution_reach
from models.sizes.state import HeadSlotSizes

BETA, _RECURRENT = (".ssm_beta.weight", ".ssm_ba.weight"), "attention.recurrent_layers"


@dataclass(frozen=True)
class DeltaNetSizes(HeadSlotSizes):
    """Number of key (and query) heads, and of value heads."""

    key_heads: int
    value_heads: int

    @property
    def inner(self) -> int:
        """Values of an output row."""
        return self.value_heads * self.head_size

    @property
    def slot_parts(self) -> int:
        """One for each key head."""
        return self.key_heads

    @property
    def part_bytes(self) -> int:
        """Bytes of one part of a layer's slot."""
        from cpu_kernels import delta_net  # most models have none

        return 4 * delta_net.head_floats(self.value_heads // self.key_heads, self.padded, self.reach)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that a thread needs."""
        from cpu_kernels import delta_net

        return delta_net.scratch_bytes(self.value_heads // self.key_heads, self.padded)

    def attends(self, heads: tuple[bool, ...]) -> tuple[bool, ...]:
        """All other layers: files state key-value heads once for all."""
        return tuple(not one for one in self.layers)


def read(file: ModelFile, heads: tuple[bool, ...], widths: tuple[int, ...]) -> DeltaNetSizes:
    """The sizes of a file's delta networks.

    Raises ModelFileError for a missing or out-of-range key, UnsupportedModelError for sizes that do not fit together.
    """
    metadata, name = file.metadata, f"{file.architecture}.ssm"
    value_heads = metadata.get_int(f"{name}.time_step_rank", minimum=1, maximum=MAX_HEADS)
    key_heads = metadata.get_int(f"{name}.group_count", minimum=1, maximum=MAX_HEADS)
    size = metadata.get_int(f"{name}.state_size", minimum=2, maximum=MAX_HEAD_SIZE)
    inner = metadata.get_int(f"{name}.inner_size", minimum=1, maximum=MAX_WIDTH)
    if value_heads % key_heads or inner != value_heads * size:
        raise UnsupportedModelError(
            f"{file.path}: {key_heads} heads of keys and {value_heads} of values, of {size} each, do not make a gated "
            f"delta network of {inner} values.",
            remedy="Use --backend llama.",
        )
    reach = convolution_reach(file, "ssm.conv_kernel")
    return DeltaNetSizes(_layers(file, len(heads)), reach, size, key_heads, value_heads)


def _layers(file: ModelFile, layers: int) -> tuple[bool, ...]:
    """All but every fourth, unless the file says otherwise. Raises UnsupportedModelError if none attends."""
    metadata, name = file.metadata, file.architecture
    if f"{name}.{_RECURRENT}" in metadata:
        blocks = metadata.get_int(f"{name}.block_count", minimum=1, maximum=MAX_LAYERS)
        recurs = tuple(metadata.get_list(f"{name}.{_RECURRENT}", bool, length=blocks)[:layers])
    else:
        period = metadata.get_int(f"{name}.full_attention_interval", 4, minimum=1, maximum=MAX_LAYERS)
        recurs = tuple((layer + 1) % period != 0 for layer in range(layers))
    if all(recurs):
        raise UnsupportedModelError(f"{file.path}: no layer has attention.", remedy="Use --backend llama.")
    return recurs
