"""Sizes of gated delta networks, and which layers have them, read from a GGUF's metadata."""

from dataclasses import dataclass

from cpu_kernels import delta_net
from cpu_kernels.kv_types import PAGE_TOKENS
from gguf_io import ModelFile
from models.errors import UnsupportedModelError

_BETA, _RECURRENT = (".ssm_beta.weight", ".ssm_ba.weight"), "attention.recurrent_layers"
_MOST_LAYERS, _MOST_HEADS, _LARGEST_HEAD, _WIDEST = 1024, 4096, 512, 1 << 20
_FURTHEST = PAGE_TOKENS + 1  # a convolution reaches back by a page at most


@dataclass(frozen=True)
class DeltaNetSizes:
    """Heads of keys (and queries) and of values, values of a head, rows that the convolution before them reads."""

    key_heads: int
    value_heads: int
    head_size: int
    reach: int

    @property
    def padded(self) -> int:
        """A head's values rounded up to whole vectors."""
        return -(-self.head_size // 16) * 16

    @property
    def inner(self) -> int:
        """Values of a row that goes out."""
        return self.value_heads * self.head_size

    @property
    def slot_parts(self) -> int:
        """Parts of a layer's slot, which threads share out."""
        return self.key_heads

    @property
    def part_bytes(self) -> int:
        """Bytes of one of them."""
        return 4 * delta_net.head_floats(self.value_heads // self.key_heads, self.padded, self.reach)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that a thread needs."""
        return delta_net.scratch_bytes(self.value_heads // self.key_heads, self.padded)


def delta_net_sizes(file: ModelFile) -> DeltaNetSizes | None:
    """Sizes of a file's gated delta networks, whose keys are those of state-space models; None where it has none.

    Raises ModelFileError for a missing or absurd key, UnsupportedModelError for sizes that do not fit each other.
    """
    if not any(tensor.endswith(_BETA) for tensor in file.tensors):
        return None
    metadata, name = file.metadata, f"{file.architecture}.ssm"
    value_heads = metadata.get_int(f"{name}.time_step_rank", minimum=1, maximum=_MOST_HEADS)
    key_heads = metadata.get_int(f"{name}.group_count", minimum=1, maximum=_MOST_HEADS)
    size = metadata.get_int(f"{name}.state_size", minimum=2, maximum=_LARGEST_HEAD)
    inner = metadata.get_int(f"{name}.inner_size", minimum=1, maximum=_WIDEST)
    if value_heads % key_heads or inner != value_heads * size:
        raise UnsupportedModelError(
            f"{file.path}: {key_heads} heads of keys and {value_heads} of values, of {size} each, do not make a gated "
            f"delta network of {inner} values. Use --backend llama."
        )
    reach = metadata.get_int(f"{name}.conv_kernel", minimum=2, maximum=_FURTHEST)
    return DeltaNetSizes(key_heads, value_heads, size, reach)


def attending_layers(file: ModelFile, layers: int) -> tuple[bool, ...]:
    """Which layers beside gated delta networks have attention: every fourth, unless the file says otherwise."""
    metadata, name = file.metadata, file.architecture
    if f"{name}.{_RECURRENT}" in metadata:
        blocks = metadata.get_int(f"{name}.block_count", minimum=1, maximum=_MOST_LAYERS)
        recurrent = metadata.get_list(f"{name}.{_RECURRENT}", bool, length=blocks)
        attends = tuple(not one for one in recurrent[:layers])
    else:
        period = metadata.get_int(f"{name}.full_attention_interval", 4, minimum=1, maximum=_MOST_LAYERS)
        attends = tuple((layer + 1) % period == 0 for layer in range(layers))
    if not any(attends):
        raise UnsupportedModelError(f"{file.path}: no layer has attention. Use --backend llama.")
    return attends
