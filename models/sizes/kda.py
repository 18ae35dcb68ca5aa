"""Sizes of Kimi delta attention (Kimi Linear), which layers without key-value heads have."""

from dataclasses import dataclass

from gguf_io import ModelFile
from models.sizes.reading import MAX_HEAD_SIZE, MAX_HEADS, convolution_reach, same_in_all_layers
from models.sizes.state import HeadSlotSizes

HEAD = "kda.head_dim"


@dataclass(frozen=True)
class KdaSizes(HeadSlotSizes):
    """Number of heads."""

    heads: int

    @property
    def inner(self) -> int:
        """Values of an output row."""
        return self.heads * self.head_size

    @property
    def slot_parts(self) -> int:
        """One for each head."""
        return self.heads

    @property
    def part_bytes(self) -> int:
        """Bytes of one part of a layer's slot."""
        from cpu_kernels import kda  # most models have none

        return 4 * kda.head_floats(self.padded, self.reach)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that a thread needs."""
        from cpu_kernels import kda

        return kda.scratch_bytes(self.padded)


def read(file: ModelFile, heads: tuple[bool, ...], widths: tuple[int, ...]) -> KdaSizes | None:
    """The sizes, None if all layers have key-value heads. Raises ModelFileError for a missing or out-of-range key."""
    if all(heads):
        return None
    metadata, name = file.metadata, file.architecture
    return KdaSizes(
        layers=tuple(not one for one in heads),
        reach=convolution_reach(file, "ssm.conv_kernel"),
        heads=same_in_all_layers(file, f"{name}.attention.head_count", MAX_HEADS),
        head_size=metadata.get_int(f"{name}.{HEAD}", minimum=2, maximum=MAX_HEAD_SIZE),
    )
