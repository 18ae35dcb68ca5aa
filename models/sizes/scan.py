"""Sizes of selective scans (Mamba-2), and the layers that have them, read from a GGUF's metadata."""

from dataclasses import dataclass

from gguf_io import ModelFile
from models.errors import UnsupportedModelError
from models.sizes.reading import MAX_HEADS, MAX_WIDTH, convolution_reach, whole_vectors
from models.sizes.state import SlotSizes

SCANS = ("falcon-h1", "granitehybrid", "mamba2", "nemotron_h", "nemotron_h_moe")
"""Architectures whose layers have selective scans."""
_BESIDE_ATTENTION = ("falcon-h1",)
ALONE = ("nemotron_h", "nemotron_h_moe")
"""Architectures whose layers are each a scan, attention, or a feed-forward network (width 0 in the others)."""
_LARGEST_HEAD = 1024
# Units that threads divide: the fewest to aim for, and the most values of a unit.
_FEWEST_UNITS, _WIDEST_UNIT = 12, 256


@dataclass(frozen=True)
class ScanSizes(SlotSizes):
    """Heads, values of a head, groups of heads that share b and c, and values of b and of c."""

    heads: int
    head_size: int
    groups: int
    state: int

    @property
    def inner(self) -> int:
        """Values of an output row."""
        return self.heads * self.head_size

    @property
    def padded_head(self) -> int:
        """A head's values rounded up to whole vectors."""
        return whole_vectors(self.head_size)

    @property
    def padded_state(self) -> int:
        """Values of b, and of c, rounded up to whole vectors."""
        return whole_vectors(self.state)

    @property
    def unit_heads(self) -> int:
        """Heads of a unit, all of one group: see cpu_kernels.selective_scan."""
        together = self.heads // self.groups
        most = max(1, min(_WIDEST_UNIT // self.padded_head, self.heads // _FEWEST_UNITS))
        return max(count for count in range(1, min(most, together) + 1) if together % count == 0)

    @property
    def slot_parts(self) -> int:
        """One for each unit."""
        return self.heads // self.unit_heads

    @property
    def part_bytes(self) -> int:
        """Bytes of one part of a layer's slot."""
        from cpu_kernels import selective_scan  # most models have none

        return 4 * selective_scan.unit_floats(self.unit_heads, self.padded_state, self.padded_head, self.reach)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that a thread needs."""
        from cpu_kernels import selective_scan

        return selective_scan.scratch_bytes(self.unit_heads, self.padded_state, self.padded_head)


def read(file: ModelFile, heads: tuple[bool, ...], widths: tuple[int, ...]) -> ScanSizes:
    """The sizes of a file's scans. widths: of layers' feed-forward networks, 0 for none.

    Raises ModelFileError for a missing or out-of-range key, UnsupportedModelError for sizes that do not fit together.
    """
    metadata, name = file.metadata, f"{file.architecture}.ssm"
    count = metadata.get_int(f"{name}.time_step_rank", minimum=1, maximum=MAX_HEADS)
    groups = metadata.get_int(f"{name}.group_count", minimum=1, maximum=MAX_HEADS)
    state = metadata.get_int(f"{name}.state_size", minimum=1, maximum=_LARGEST_HEAD)
    inner = metadata.get_int(f"{name}.inner_size", minimum=1, maximum=MAX_WIDTH)
    if count % groups or inner % count or inner // count > _LARGEST_HEAD:
        raise UnsupportedModelError(
            f"{file.path}: {count} heads in {groups} groups do not make a selective scan of {inner} values.",
            remedy="Use --backend llama.",
        )
    reach = convolution_reach(file, "ssm.conv_kernel")
    return ScanSizes(_layers(file, heads, widths), reach, count, inner // count, groups, state)


def _layers(file: ModelFile, attends: tuple[bool, ...], widths: tuple[int, ...]) -> tuple[bool, ...]:
    """Which layers have a scan.

    Raises UnsupportedModelError if no layer has one, or if a layer combines what its architecture does not combine.
    """
    name = file.architecture
    scans = tuple(name in _BESIDE_ATTENTION or not one for one in attends)
    if name in ALONE:
        for layer, (attending, width) in enumerate(zip(attends, widths, strict=True)):
            if attending and width:
                raise UnsupportedModelError(
                    f"{file.path}: layer {layer} has key-value heads and a feed-forward network, which {name} does not "
                    "combine.",
                    remedy="Use --backend llama.",
                )
        scans = tuple(not attending and not width for attending, width in zip(attends, widths, strict=True))
    if not any(scans):
        raise UnsupportedModelError(
            f"{file.path}: no layer of {name} has a selective scan.", remedy="Use --backend llama."
        )
    return scans
