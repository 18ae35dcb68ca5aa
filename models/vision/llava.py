"""The image encoder of LLaVA 1.5 and its like (CLIP): a square picture, padded with the average colour.

Source: tools/mtmd/models/llava.cpp in llama.cpp, which numbers positions from the first patch instead of the class, and
returns the class in place of the first patch.
"""

from gguf_io import ModelFile
from gguf_io.media import Size
from gguf_io.pictures import Budget
from models.errors import refusal
from models.vision.config import PREFIX, read_vision_config
from models.vision.family import Passes, Rows
from models.vision.layout import ImageLayout, RowRun
from models.vision.pixels import BICUBIC, Pixels, padded_to_square
from models.vision.recording import VisionRecording
from models.vision.stages import RowStage, matrix_outputs, record_mlp
from models.vision.tower import Style
from models.vision.vit import Vit
from models.weights import WeightLoader

_LAYERS = "mm.0", "mm.2"
_COLOUR = (122, 116, 104)
_TILED = {"image_grid_pinpoints": "cuts pictures into tiles", "feature_layer": "joins several layers"}


class Llava(Vit):
    """See models.vision.family.EncoderFamily."""

    def __init__(self, file: ModelFile) -> None:
        config = read_vision_config(file, "no_merge")
        for key, what in _TILED.items():
            if PREFIX + key in file.metadata:
                raise refusal(file, f"its image encoder {what} ({PREFIX}{key})")
        # The last layer is not computed: the projection was trained on the states before it.
        self._last_layer = config.layers - 1
        style = Style(swapped=True, layers=self._last_layer)
        super().__init__(file, config, (config.side // config.patch) ** 2, style)
        self.width = matrix_outputs(file, f"{_LAYERS[1]}.weight")
        self.longest = max(self.longest, matrix_outputs(file, f"{_LAYERS[0]}.weight"))

    def layout(self, source: Size, budget: Budget) -> ImageLayout:
        side = self.config.side
        return ImageLayout(source, (side, side), (RowRun(self.across**2),))

    def record(self, loader: WeightLoader, recording: VisionRecording) -> None:
        super().record(loader, recording)
        loader.leave_out(*loader.names(f"v.blk.{self._last_layer}."))

    def record_projection(self, loader: WeightLoader, recording: VisionRecording) -> RowStage:
        return record_mlp(loader, recording, _LAYERS, self.config.width)

    def work(self, layout: ImageLayout) -> float:
        return self.work_of(self.across**2)

    def encode(self, pixels: Pixels, layout: ImageLayout, passes: Passes) -> list[Rows]:
        return self.embeddings([padded_to_square(pixels, self.config.side, BICUBIC, _COLOUR)], passes)
