"""Gemma 3's image encoder (SigLIP): a square picture, whose patches are averaged over squares at the end.

Source: tools/mtmd/models/siglip.cpp in llama.cpp. Pictures are stretched, as Gemma 3's image processor in transformers
does unless pan and scan is asked for.
"""

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from gguf_io.media import Size
from gguf_io.pictures import Budget
from models.vision.config import read_vision_config
from models.vision.family import EncoderFamily, Passes, Rows
from models.vision.layout import ImageLayout, RowRun
from models.vision.pixels import BILINEAR, Pixels, patch_rows, resized
from models.vision.recording import VisionRecording
from models.vision.stages import RowStage, record_norm, record_patches
from models.vision.tower import Style, Tower
from models.weights import WeightLoader

BEGIN, END = "<start_of_image>", "<end_of_image>"
_PROJECTION, _POSITIONS = "mm.input_projection.weight", "v.position_embd.weight"


class Gemma3(EncoderFamily):
    """See models.vision.family.EncoderFamily."""

    def __init__(self, file: ModelFile) -> None:
        self.config = config = read_vision_config(file, merge=4)
        if config.side % (config.patch * config.merge):
            raise ModelFileError(
                f"{file.path}: a picture of {config.side} pixels cannot be divided into patches of {config.patch} and "
                f"squares of {config.merge}. Convert the model again or use another version of it."
            )
        self._across = config.side // config.patch
        self.width = projection_width(file, config.width)
        self._tower = tower = Tower(file, config, self._across**2, Style(swapped=True))
        self.longest = max(tower.longest, 3 * config.patch**2)
        self.longest_head, self.pass_rows = tower.longest_head, tower.pass_rows
        self.picture_bytes = self._across**2 * (tower.row_bytes + 12 * config.patch**2 + 4 * config.width)

    def layout(self, source: Size, budget: Budget) -> ImageLayout:
        side = self.config.side
        return ImageLayout(source, (side, side), (BEGIN, RowRun(self._rows, sees_all=True), END))

    def record(self, loader: WeightLoader, recording: VisionRecording) -> None:
        config = self.config
        self._patches = record_patches(loader, recording, config)
        self._positions = loader.array(_POSITIONS, self._across**2, config.width)
        self._tower.record(recording)
        self._norm = record_norm(recording, "v.post_ln", config)
        # Stored with a row for each input, unlike other matrices.
        read = loader.values(_PROJECTION, config.width, self.width)
        matrix = loader.matrix_of(_PROJECTION, self.width, config.width, lambda: read().T)
        source, target = recording.rows(config.width), recording.rows(self.width)
        weight = recording.vector("mm.soft_emb_norm.weight", config.width)
        with recording.part() as part:
            recording.pack(source.place, matrix, weight=weight, epsilon=config.epsilon)
            recording.product(matrix, target)
        self._project = RowStage(part, source, config.width, target, self.width, 2.0 * config.width * self.width)

    def work(self, layout: ImageLayout) -> float:
        patches, norm = self._across**2, self._norm.work if self._norm else 0.0
        return patches * (self._patches.work + norm) + self._tower.work(patches) + self._rows * self._project.work

    def encode(self, pixels: Pixels, layout: ImageLayout, passes: Passes) -> list[Rows]:
        picture = resized(pixels, layout.resized, BILINEAR)
        x = self._patches.run(patch_rows(picture, self.config.patch, self.config), passes) + self._positions
        self._tower.run(x, passes)
        if self._norm:
            x = self._norm.run(x, passes)
        merge, across = self.config.merge, self._across // self.config.merge
        pooled = x.reshape(across, merge, across, merge, -1).mean((1, 3))
        return [self._project.run(pooled.reshape(self._rows, -1), passes)]

    @property
    def _rows(self) -> int:
        return (self._across // self.config.merge) ** 2


def projection_width(file: ModelFile, width: int) -> int:
    """Values of a row of embeddings. Raises ModelFileError if the projection is missing or does not fit."""
    shape = file.tensors[_PROJECTION].shape if _PROJECTION in file.tensors else ()
    if len(shape) != 2 or shape[0] != width:
        raise ModelFileError(
            f"{file.path}: {_PROJECTION} must be a matrix with {width} rows. "
            "Convert the model again or use another version of it."
        )
    return shape[1]
