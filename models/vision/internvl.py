"""InternVL's image encoder (InternViT): tiles in the best of some grids, then the whole picture as one more tile.

Source: tools/mtmd/models/internvl.cpp in llama.cpp; grids are those of InternVL's own dynamic_preprocess.
"""

import numpy as np

from gguf_io import ModelFile
from gguf_io.media import Size
from gguf_io.pictures import Budget
from models.vision.config import PREFIX, read_vision_config
from models.vision.family import Passes, Rows
from models.vision.layout import ImageLayout, RowRun, closest_grid
from models.vision.pixels import BICUBIC, Pixels, resized, tiles_of
from models.vision.recording import VisionRecording
from models.vision.stages import RowStage, matrix_outputs, record_mlp
from models.vision.tower import Style
from models.vision.vit import Vit
from models.weights import WeightLoader

BEGIN, END = "<img>", "</img>"
_LARGEST = (3200, 45)
"""Width and layers of the model's largest encoder, which has RMSNorm."""
_NORM, _LAYERS = "mm.model.mlp.0", ("mm.model.mlp.1", "mm.model.mlp.3")
_MOST_TILES, _MAX_TILES = 12, 64


class InternVL(Vit):
    """See models.vision.family.EncoderFamily."""

    def __init__(self, file: ModelFile) -> None:
        config = read_vision_config(file)
        style = Style(rms=(config.width, config.layers) == _LARGEST)
        super().__init__(file, config, (config.side // config.patch) ** 2, style)
        self.width = matrix_outputs(file, f"{_LAYERS[1]}.weight")
        self.longest = max(self.longest, matrix_outputs(file, f"{_LAYERS[0]}.weight"))
        number = file.metadata.get_int
        self._most = number(f"{PREFIX}preproc_max_tiles", _MOST_TILES, minimum=1, maximum=_MAX_TILES)
        self._least = number(f"{PREFIX}preproc_min_tiles", 1, minimum=1, maximum=self._most)

    def layout(self, source: Size, budget: Budget) -> ImageLayout:
        side = self.config.side
        tile = (self.across // self.config.merge) ** 2
        most = self._most
        if budget.most_tokens is not None:  # several tiles come with an overview
            most = max(1, min(most, budget.most_tokens // tile - 1))
        columns, rows = closest_grid(source, side, min(self._least, most), most)
        count = columns * rows
        run = RowRun((count + (count > 1)) * tile)
        overview = (side, side) if count > 1 else None
        return ImageLayout(source, (columns * side, rows * side), (BEGIN, run, END), (rows, columns), overview)

    def record_projection(self, loader: WeightLoader, recording: VisionRecording) -> RowStage:
        return record_mlp(loader, recording, _LAYERS, self.config.merge**2 * self.config.width, norm=_NORM)

    def work(self, layout: ImageLayout) -> float:
        rows, columns = layout.tiles
        return (rows * columns + (layout.overview is not None)) * self.work_of(self.across**2)

    def encode(self, pixels: Pixels, layout: ImageLayout, passes: Passes) -> list[Rows]:
        pictures = list(tiles_of(resized(pixels, layout.resized, BICUBIC), self.config.side))
        if layout.overview:
            pictures.append(resized(pixels, layout.overview, BICUBIC))
        return [np.concatenate(self.embeddings(pictures, passes))]
