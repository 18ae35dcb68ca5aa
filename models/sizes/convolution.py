"""Sizes of short convolutions (LFM2), which layers without key-value heads have."""

from dataclasses import dataclass

from gguf_io import ModelFile
from models.sizes.reading import MAX_WIDTH, convolution_reach, whole_vectors
from models.sizes.state import StateSizes

REACH = "shortconv.l_cache"


@dataclass(frozen=True)
class ConvolutionSizes(StateSizes):
    """width: values of a row, without padding."""

    width: int

    @property
    def padded(self) -> int:
        """Values of a row with padding."""
        return whole_vectors(self.width, 32)

    @property
    def rows(self) -> int:
        """Rows of each layer that a page keeps."""
        return self.reach - 1

    @property
    def layer_bytes(self) -> int:
        """Bytes of a page for one layer."""
        return 4 * self.rows * self.padded


def read(file: ModelFile, heads: tuple[bool, ...], widths: tuple[int, ...]) -> ConvolutionSizes | None:
    """The sizes of a file's convolutions, None if all layers have heads. Raises ModelFileError."""
    if all(heads):
        return None
    width = file.metadata.get_int(f"{file.architecture}.embedding_length", minimum=1, maximum=MAX_WIDTH)
    return ConvolutionSizes(tuple(not one for one in heads), convolution_reach(file, REACH), width)
