"""What the rest of the program knows of a packed weight format."""

from typing import Any

from cpu_kernels.formats.panels import Panels, panel_tiles
from cpu_kernels.kernel import Kernel
from cpu_kernels.matmul import gemv_kernel, plain_tiles, tiles_kernel
from cpu_kernels.packing import embed_kernel, repack_kernel
from cpu_kernels.records import TILE_WIDTHS, Form
from cpu_kernels.simd.dot import has_short_sums


class WeightFormat:
    """A way to store a matrix so that a vector lane is an output row, and the kernels that read it.

    name: the GGUF block type it is packed from. form: which packed activations it multiplies. Rows stand in groups of
    group_rows; a row's length must be a multiple of `block`, and each `block` values of a group take group_block_bytes.
    The functions' signatures are given in cpu_kernels.matmul and cpu_kernels.packing.
    """

    def __init__(
        self,
        *,
        name: str,
        form: Form,
        group_rows: int,
        block: int,
        group_block_bytes: int,
        pack_row: Any,
        unpack_row: Any,
        gemv: Any,
        tile: Any,
        panels: Panels | None = None,
    ) -> None:
        self.name = name
        self.form = form
        self.group_rows = group_rows
        self.block = block
        self._group_block_bytes = group_block_bytes
        self.repack = repack_kernel(pack_row, name)
        self.embed = embed_kernel(unpack_row, name)
        self.matmul: dict[int, Kernel] = {1: gemv_kernel(gemv, name)}
        for width in TILE_WIDTHS[1:]:
            tiles = plain_tiles(tile, width, group_rows // 16)
            if panels is not None and has_short_sums():
                tiles = panel_tiles(panels, tiles)
            self.matmul[width] = tiles_kernel(tiles, name)

    def group_bytes(self, k: int) -> int:
        """Bytes of a group of rows of k values."""
        return k // self.block * self._group_block_bytes
