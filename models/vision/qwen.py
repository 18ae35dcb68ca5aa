"""The image encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any shape, rotated heads, merged squares.

Rows are ordered so that the patches of a square, which becomes one row of embeddings, follow each other. Sources:
tools/mtmd/models/qwen2vl.cpp and qwen3vl.cpp in llama.cpp; sizes follow smart_resize in transformers.
"""

import numpy as np
from numpy.typing import NDArray

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.media import Size
from gguf_io.pictures import Budget
from models.vision.config import PREFIX, read_vision_config
from models.vision.family import EncoderFamily, Passes, Rows
from models.vision.layout import ImageLayout, RowRun, rounded_size
from models.vision.pixels import BICUBIC, Pixels, patch_rows, resized
from models.vision.recording import VisionRecording
from models.vision.stages import matrix_outputs, needed_norm, record_mlp, record_norm, record_patches
from models.vision.tower import Style, Tower, halves_order, heads_of, rotation
from models.weights import WeightLoader

BEGIN, END = "<|vision_start|>", "<|vision_end|>"
MOST_TOKENS = 4096
_LEAST_TOKENS = {"qwen3vl_merger": 64}
_ROPE_BASE, _WINDOW_PIXELS = 10000.0, 112
_POSITIONS, _SECOND = "v.position_embd.weight", "v.patch_embd.weight.1"
_MERGER = ("mm.0", "mm.2")


class Qwen(EncoderFamily):
    """See models.vision.family.EncoderFamily."""

    def __init__(self, file: ModelFile) -> None:
        self.config = config = read_vision_config(file, "spatial_merge_size", 2)
        windowed = config.kind == "qwen2.5vl_merger"
        heads = heads_of(config)
        if config.head_size % 4:
            raise ModelFileError(f"{file.path}: heads of {config.head_size} values have no two rotated parts.")
        self._unit = config.patch * config.merge
        number = file.metadata.get_int
        self._period = number(f"{PREFIX}n_wa_pattern", minimum=1, maximum=1024) if windowed else 1
        self._window = max(1, _WINDOW_PIXELS // self._unit)
        self._rms = windowed
        style = Style(
            rms=windowed,
            swapped=config.kind != "qwen3vl_merger",
            order=halves_order(1, heads),
            sees_all=lambda layer: (layer + 1) % self._period == 0,
        )
        squares = config.merge**2
        self._tower = tower = Tower(file, config, MOST_TOKENS * squares, style)
        self._deep = [layer for layer in range(config.layers) if f"v.deepstack.{layer}.fc1.weight" in file.tensors]
        self._text = matrix_outputs(file, f"{_MERGER[1]}.weight")
        self.width = self._text * (1 + len(self._deep))
        inner = [matrix_outputs(file, f"v.deepstack.{layer}.fc1.weight") for layer in self._deep]
        self.longest = max(tower.longest, squares * config.width, matrix_outputs(file, f"{_MERGER[0]}.weight"), *inner)
        self.longest = max(self.longest, 3 * config.patch**2)
        self.longest_head, self.pass_rows = tower.longest_head, tower.pass_rows
        of_row = tower.row_bytes + 24 * config.patch**2 + 4 * (3 * config.width + heads.padded)
        self.picture_bytes = MOST_TOKENS * (squares * of_row + 4 * self.width)

    def layout(self, source: Size, budget: Budget) -> ImageLayout:
        most = min(budget.most_tokens or MOST_TOKENS, MOST_TOKENS)
        least = min(budget.least_tokens or _LEAST_TOKENS.get(self.config.kind, 4), most)
        size = rounded_size(source, self._unit, least, most)
        rows, columns = size[1] // self._unit, size[0] // self._unit
        return ImageLayout(source, size, (BEGIN, RowRun(rows * columns, (rows, columns)), END))

    def record(self, loader: WeightLoader, recording: VisionRecording) -> None:
        config = self.config
        inputs = config.merge**2 * config.width
        self._patches = record_patches(loader, recording, config, _SECOND)
        self._table: Rows | None = None
        if config.kind == "qwen3vl_merger":
            self._across = round((loader.shape(_POSITIONS) or (0,))[0] ** 0.5)
            self._table = loader.array(_POSITIONS, self._across**2, config.width)
        self._first = record_norm(recording, "v.pre_ln", config, rms=self._rms)
        self._tower.record(recording)
        self._last = needed_norm(recording, "v.post_ln", config, rms=self._rms)
        self._merge = record_mlp(loader, recording, _MERGER, inputs)
        self._deepstack = {}
        for layer in self._deep:
            name = f"v.deepstack.{layer}"
            names = f"{name}.fc1", f"{name}.fc2"
            self._deepstack[layer] = record_mlp(
                loader, recording, names, inputs, norm=f"{name}.norm", epsilon=config.epsilon
            )

    def work(self, layout: ImageLayout) -> float:
        rows = layout.tokens * self.config.merge**2
        of_rows = self._patches.work + self._last.work + (self._first.work if self._first else 0.0)
        of_tokens = self._merge.work + sum(stage.work for stage in self._deepstack.values())
        return rows * of_rows + self._tower.work(rows) + layout.tokens * of_tokens

    def encode(self, pixels: Pixels, layout: ImageLayout, passes: Passes) -> list[Rows]:
        config, squares = self.config, self.config.merge**2
        columns, lines = (side // config.patch for side in layout.resized)
        units, windows = self._units(lines // config.merge, columns // config.merge)
        order = self._order(lines, columns)[units].reshape(-1)
        picture = resized(pixels, layout.resized, BICUBIC)
        x = self._patches.run(patch_rows(picture, config.patch, config)[order], passes)
        if self._table is not None:
            x += _stretched(self._table, self._across, lines, columns)[order]
        if self._first:
            x = self._first.run(x, passes)
        pairs = config.head_size // 4
        rates = _ROPE_BASE ** (-np.arange(pairs) / pairs)
        angles = np.concatenate([np.outer(order // columns, rates), np.outer(order % columns, rates)], axis=1)
        deep: list[Rows] = []

        def after_layer(layer: int) -> None:
            if layer in self._deepstack:
                deep.append(self._deepstack[layer].run(x.reshape(-1, squares * config.width), passes))

        table = rotation(angles, heads_of(config))
        self._tower.run(x, passes, table=table, windows=windows, after_layer=after_layer)
        x = self._last.run(x, passes)
        merged = self._merge.run(x.reshape(-1, squares * config.width), passes)
        found = np.empty((layout.tokens, self.width), np.float32)
        found[units] = np.concatenate([merged, *deep], axis=1)
        return [found]

    def _order(self, lines: int, columns: int) -> NDArray[np.int64]:
        """The patches of each square in reading order: int64[squares, merge * merge]."""
        merge = self.config.merge
        grid = np.arange(lines * columns).reshape(lines // merge, merge, columns // merge, merge)
        return grid.swapaxes(1, 2).reshape(-1, merge**2)

    def _units(self, lines: int, columns: int) -> tuple[NDArray[np.int64], list[int]]:
        """Squares in the order in which they are computed, window by window, and the patches of each window."""
        grid = np.arange(lines * columns).reshape(lines, columns)
        if self._period == 1:
            return grid.reshape(-1), []
        side = self._window
        windows = [
            grid[top : top + side, left : left + side].reshape(-1)
            for top in range(0, lines, side)
            for left in range(0, columns, side)
        ]
        return np.concatenate(windows), [len(window) * self.config.merge**2 for window in windows]


def _stretched(table: Rows, across: int, lines: int, columns: int) -> Rows:
    """Learned positions of a square grid, interpolated so that the corners stay in place: float32[patches, width]."""
    grid = table.reshape(across, across, -1)
    for axis, count in ((0, lines), (1, columns)):
        places = np.linspace(0, across - 1, count)
        low = np.floor(places).astype(np.int64)
        part = (places - low).astype(np.float32).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        high = np.minimum(low + 1, across - 1)
        grid = grid.take(low, axis) * (1 - part) + grid.take(high, axis) * part
    return np.asarray(grid.reshape(lines * columns, -1), np.float32)
