"""Pixtral's image encoder, also of Mistral Small 3.1 and later: pictures of any shape, with a row after each line.

Sources: tools/mtmd/models/pixtral.cpp in llama.cpp; sizes follow Pixtral's image processor in transformers.
"""

import math

import numpy as np

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.media import Size
from gguf_io.pictures import Budget
from models.vision.config import read_vision_config
from models.vision.family import EncoderFamily, Passes, Rows
from models.vision.layout import ImageLayout, RowRun, rounded_size
from models.vision.pixels import BICUBIC, Pixels, patch_rows, resized
from models.vision.recording import VisionRecording
from models.vision.stages import RowStage, matrix_outputs, needed_norm, record_linear, record_mlp, record_patches
from models.vision.tower import Style, Tower, heads_of, neighbours_order, rotation
from models.vision.vit import squares
from models.weights import WeightLoader

END = "[IMG_END]"
_BREAK = "v.token_embd.img_break"
_ROPE_BASE = 10000.0
_LAYERS = "mm.1", "mm.2"
_NORM, _MERGER = "mm.input_norm", "mm.patch_merger"


class Pixtral(EncoderFamily):
    """See models.vision.family.EncoderFamily."""

    def __init__(self, file: ModelFile) -> None:
        self.config = config = read_vision_config(file, "spatial_merge_size")
        self._unit = config.patch * config.merge
        if config.head_size % 4 or config.side < self._unit:
            raise ModelFileError(
                f"{file.path}: heads of {config.head_size} values and pictures of at most {config.side} pixels are not "
                "those of this type of image encoder. Use another version of it."
            )
        self._most = math.ceil(config.side / self._unit) ** 2
        patches = self._most * config.merge**2
        self._tower = tower = Tower(file, config, patches, Style(rms=True, order=neighbours_order(heads_of(config))))
        self.width = matrix_outputs(file, f"{_LAYERS[1]}.weight")
        inner = matrix_outputs(file, f"{_LAYERS[0]}.weight")
        self.longest = max(tower.longest, 3 * config.patch**2, config.merge**2 * config.width, inner)
        self.longest_head, self.pass_rows = tower.longest_head, tower.pass_rows
        of_row = tower.row_bytes + 24 * config.patch**2 + 4 * (4 * config.width + heads_of(config).padded)
        self.picture_bytes = patches * (of_row + 4 * self.width)

    def layout(self, source: Size, budget: Budget) -> ImageLayout:
        unit, most = self._unit, self._most
        least = min(budget.least_tokens or 0, most)
        for longest in range(self.config.side, 0, -unit):
            shrink = max(1.0, max(source) / longest)
            columns, rows = (max(1, math.ceil(math.floor(side / shrink) / unit)) for side in source)
            if columns * rows < least:
                sides = rounded_size(source, unit, least, most)
                columns, rows = sides[0] // unit, sides[1] // unit
            run = RowRun(rows * (columns + 1) - 1)
            if budget.most_tokens is None or run.count <= budget.most_tokens:
                break
        return ImageLayout(source, (columns * unit, rows * unit), (run, END))

    def record(self, loader: WeightLoader, recording: VisionRecording) -> None:
        config = self.config
        self._patches = record_patches(loader, recording, config)
        self._first = needed_norm(recording, "v.pre_ln", config, rms=True)
        self._tower.record(recording)
        self._norm: RowStage | None = None
        self._merger: RowStage | None = None
        if config.merge > 1:
            self._norm = needed_norm(recording, _NORM, config, rms=True)
            self._merger = record_linear(loader, recording, _MERGER, config.width, config.merge**2 * config.width)
        self._project = record_mlp(loader, recording, _LAYERS, config.width)
        self._break = loader.array(_BREAK, self.width)

    def work(self, layout: ImageLayout) -> float:
        tokens = math.prod(layout.resized) / self._unit**2
        rows = tokens * self.config.merge**2
        of_rows = self._patches.work + self._first.work + (self._norm.work if self._norm else 0.0)
        of_tokens = self._project.work + (self._merger.work if self._merger else 0.0)
        return rows * of_rows + self._tower.work(int(rows)) + tokens * of_tokens

    def encode(self, pixels: Pixels, layout: ImageLayout, passes: Passes) -> list[Rows]:
        config = self.config
        across, down = (side // config.patch for side in layout.resized)
        picture = resized(pixels, layout.resized, BICUBIC)
        x = self._patches.run(patch_rows(picture, config.patch, config), passes)
        x = self._first.run(x, passes)
        pairs = config.head_size // 4
        rates = _ROPE_BASE ** (-np.arange(2 * pairs) / (2 * pairs))
        lines, columns = np.divmod(np.arange(down * across), across)
        angles = np.concatenate([np.outer(lines, rates[::2]), np.outer(columns, rates[1::2])], axis=1)
        self._tower.run(x, passes, table=rotation(angles, heads_of(config)))
        if self._norm and self._merger:
            x = self._norm.run(x, passes)
            # A square's values are ordered by channel, then by line and column.
            merged = squares(x, down, across, config.merge).reshape(-1, config.merge**2, config.width)
            x = self._merger.run(merged.swapaxes(1, 2).reshape(len(merged), -1), passes)
        rows = self._project.run(x, passes)
        grid = np.empty((down // config.merge, across // config.merge + 1, self.width), np.float32)
        grid[:, :-1] = rows.reshape(len(grid), -1, self.width)
        grid[:, -1] = self._break
        return [grid.reshape(-1, self.width)[:-1]]
