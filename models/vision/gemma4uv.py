"""Gemma 4 12B's image encoder: no transformer, only a projection of large patches between norms.

A patch of 48 x 48 pixels is a row: LayerNorm, a dense layer, LayerNorm, learned positions (a table for columns and one
for rows), LayerNorm, RMSNorm, and a linear layer. Source: tools/mtmd/models/gemma4uv.cpp in llama.cpp; sizes follow
Gemma 4's image processor in transformers.
"""

import numpy as np

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.media import Size
from gguf_io.pictures import Budget
from models.vision.config import read_vision_config
from models.vision.family import EncoderFamily, Passes, Rows
from models.vision.layout import ImageLayout, PictureSizeError, RowRun, filled_size
from models.vision.pixels import BICUBIC, Pixels, patch_rows, resized
from models.vision.recording import VisionRecording, rows_of_a_pass
from models.vision.stages import TORCH_EPSILON
from models.weights import WeightLoader

BEGIN, END = "<|image>", "<image|>"
MOST_TOKENS = 1120
USUAL_TOKENS = 280
"""The most rows of a picture, and the number that is filled unless a budget says otherwise."""
POSITIONS = "v.position_embd.weight"
PROJECTION = "mm.input_projection.weight"


class Gemma4Unified(EncoderFamily):
    """See models.vision.family.EncoderFamily."""

    together = MOST_TOKENS

    def __init__(self, file: ModelFile) -> None:
        self.config = config = read_vision_config(file, merge=3)
        self._patch = config.patch * config.merge
        self._positions = table_positions(file, config.width)
        self.width = projection_width(file, config.width)
        self._pixels = 3 * self._patch**2
        self.longest = max(self._pixels, config.width)
        self._row_work = 2.0 * config.width * (self._pixels + self.width)
        self.pass_rows = rows_of_a_pass(self._row_work)
        self.picture_bytes = 4 * MOST_TOKENS * (self._pixels + self.width)

    def layout(self, source: Size, budget: Budget) -> ImageLayout:
        return filled_layout(source, budget, self._patch, self._positions * self._patch, sees_all=True)

    def record(self, loader: WeightLoader, recording: VisionRecording) -> None:
        config = self.config
        self._table = loader.array(POSITIONS, 2, self._positions, config.width)
        dense = loader.matrix("v.patch_embd.weight", config.width, self._pixels)
        projection = loader.matrix(PROJECTION, self.width, config.width)
        self._in, self._x = recording.rows(self._pixels), recording.rows(config.width)
        self._places, self._out = recording.rows(config.width), recording.rows(self.width)
        with recording.part() as self._part:
            recording.layer_norm_pack(self._in.place, "v.patch_norm.1", TORCH_EPSILON, dense)
            recording.product(dense, self._x, addend=recording.bias("v.patch_embd.bias", config.width))
            recording.layer_norm(self._x, "v.patch_norm.2", config.width, TORCH_EPSILON)
            recording.layer_norm(self._x, "v.patch_norm.3", config.width, TORCH_EPSILON, plus=self._places)
            weight = recording.ones(config.width)
            recording.pack(self._x.place, projection, weight=weight, epsilon=config.epsilon)
            recording.product(projection, self._out)

    def work(self, layout: ImageLayout) -> float:
        return float(layout.tokens)

    def encode(self, pixels: Pixels, layout: ImageLayout, passes: Passes) -> list[Rows]:
        patches = patch_rows(resized(pixels, layout.resized, BICUBIC), self._patch, self.config)
        lines, columns = np.divmod(np.arange(len(patches)), layout.resized[0] // self._patch)
        found = np.empty((len(patches), self.width), np.float32)
        for first in range(0, len(patches), passes.most):
            part = slice(first, min(first + passes.most, len(patches)))
            count = part.stop - first
            self._in.values[:count, : self._pixels] = patches[part]
            self._places.values[:count, : self.config.width] = (
                self._table[0, columns[part]] + self._table[1, lines[part]]
            )
            passes.run(self._part, count, count)
            found[part] = self._out.values[:count, : self.width]
        return [found]


def filled_layout(source: Size, budget: Budget, unit: int, longest: int, *, sees_all: bool) -> ImageLayout:
    """The layout of a picture that fills Gemma 4's budget. unit: pixels along a row's side. longest: of the picture."""
    most = min(budget.most_tokens or max(USUAL_TOKENS, budget.least_tokens or 0), MOST_TOKENS)
    size = filled_size(source, unit, most)
    if max(size) > longest:
        raise PictureSizeError(
            f"A picture of {source[0]:,} x {source[1]:,} pixels is too thin for this model. Cut it into parts."
        )
    rows = size[0] // unit * (size[1] // unit)
    return ImageLayout(source, size, (BEGIN, RowRun(rows, sees_all=sees_all), END))


def table_positions(file: ModelFile, width: int) -> int:
    """Positions along a side in the table of learned positions. Raises ModelFileError if there is no such table."""
    shape = file.tensors[POSITIONS].shape if POSITIONS in file.tensors else ()
    if len(shape) != 3 or shape[0] != 2 or shape[2] != width:
        raise ModelFileError(
            f"{file.path}: {POSITIONS} must be a table of columns and one of rows, with {width} values for each "
            "position. Convert the model again or use another version of it."
        )
    return shape[1]


def projection_width(file: ModelFile, width: int) -> int:
    """Values of a row of embeddings. Raises ModelFileError if the last layer is missing or does not fit."""
    shape = file.tensors[PROJECTION].shape if PROJECTION in file.tensors else ()
    if len(shape) != 2 or shape[1] != width:
        raise ModelFileError(
            f"{file.path}: {PROJECTION} must be a matrix with {width} columns. "
            "Convert the model again or use another version of it."
        )
    return shape[0]
