"""LFM2-VL's image encoder (SigLIP 2): pictures of any shape, large ones also in tiles, with stretched positions.

Source: tools/mtmd/models/siglip.cpp in llama.cpp, and LFM2-VL's image processor in transformers.
"""

import math

import numpy as np
from numpy.typing import NDArray

from gguf_io import ModelFile
from gguf_io.media import Size
from gguf_io.pictures import Budget
from models.vision.config import read_vision_config
from models.vision.family import Passes, Rows
from models.vision.layout import ImageLayout, RowRun, closest_grid, rounded_size
from models.vision.pixels import BILINEAR, Pixels, resized, tiles_of
from models.vision.recording import VisionRecording
from models.vision.stages import RowStage, matrix_outputs, record_mlp
from models.vision.tower import Style
from models.vision.vit import Vit
from models.weights import WeightLoader

BEGIN, END = "<|image_start|>", "<|image_end|>"
_TILE, _LEAST_TILES, _MOST_TILES = 512, 2, 10
_LEAST_TOKENS, _MOST_TOKENS = 64, 256
_LARGE = 2.0
"""Pictures with more than this many times the most tokens are cut into tiles."""
_NORM, _LAYERS = "mm.input_norm", ("mm.1", "mm.2")


class Lfm2(Vit):
    """See models.vision.family.EncoderFamily."""

    def __init__(self, file: ModelFile) -> None:
        config = read_vision_config(file, merge=2)
        most = max(_MOST_TOKENS * config.merge**2, (_TILE // config.patch) ** 2)
        super().__init__(file, config, most, Style(swapped=True))
        self.width = matrix_outputs(file, f"{_LAYERS[1]}.weight")
        self.longest = max(self.longest, matrix_outputs(file, f"{_LAYERS[0]}.weight"))

    def layout(self, source: Size, budget: Budget) -> ImageLayout:
        unit = self.config.patch * self.config.merge
        most = min(budget.most_tokens or _MOST_TOKENS, _MOST_TOKENS)
        size = rounded_size(source, unit, min(budget.least_tokens or _LEAST_TOKENS, most), most)
        whole, tile = RowRun(size[0] // unit * (size[1] // unit)), RowRun(math.ceil(_TILE / unit) ** 2)
        tiles = _MOST_TILES
        if budget.most_tokens is not None:
            tiles = min(tiles, (budget.most_tokens - whole.count) // tile.count)
        natural = max(1, round(source[0] / unit)) * max(1, round(source[1] / unit))
        if natural <= _LARGE * _MOST_TOKENS or tiles < _LEAST_TILES:
            return ImageLayout(source, size, (BEGIN, whole, END))
        columns, rows = closest_grid(source, _TILE, _LEAST_TILES, tiles)
        pieces: list[str | RowRun] = []
        for row in range(rows):
            for column in range(columns):
                begin = "" if pieces else BEGIN
                pieces += [f"{begin}<|img_row_{row + 1}_col_{column + 1}|>", tile]
        pieces += ["<|img_thumbnail|>", whole, END]
        return ImageLayout(source, (columns * _TILE, rows * _TILE), tuple(pieces), (rows, columns), size)

    def record_projection(self, loader: WeightLoader, recording: VisionRecording) -> RowStage:
        norm = _NORM if loader.has(f"{_NORM}.weight") else ""
        return record_mlp(loader, recording, _LAYERS, self.config.merge**2 * self.config.width, norm=norm)

    def positions(self, lines: int, columns: int) -> Rows:
        grid = np.asarray(self._positions, np.float32).reshape(self.across, self.across, -1)
        grid = np.einsum("yl,lcw->ycw", _weights(self.across, lines), grid)
        grid = np.einsum("xc,ycw->yxw", _weights(self.across, columns), grid)
        return np.asarray(grid.reshape(lines * columns, -1), np.float32)

    def work(self, layout: ImageLayout) -> float:
        rows, columns = layout.tiles
        whole = layout.overview or layout.resized
        found = self.work_of(whole[0] * whole[1] // self.config.patch**2)
        return found + (rows * columns * self.work_of((_TILE // self.config.patch) ** 2) if layout.overview else 0.0)

    def encode(self, pixels: Pixels, layout: ImageLayout, passes: Passes) -> list[Rows]:
        picture = resized(pixels, layout.resized, BILINEAR)
        if layout.overview is None:
            return self.embeddings([picture], passes)
        return self.embeddings([*tiles_of(picture, _TILE), resized(pixels, layout.overview, BILINEAR)], passes)


def _weights(count: int, places: int) -> NDArray[np.float32]:
    """What each of `count` values adds to each of `places` values between them, which mean several if they are fewer.

    Source: bilinear interpolation with antialiasing in PyTorch.
    """
    step = count / places
    centres = (np.arange(places) + 0.5) * step
    distances = np.abs(np.arange(count) + 0.5 - centres[:, None]) / max(step, 1.0)
    weights = np.maximum(1 - distances, 0)
    return np.asarray(weights / weights.sum(1, keepdims=True), np.float32)
