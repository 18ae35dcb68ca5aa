"""The image encoder of Idefics 3 and SmolVLM (SigLIP): tiles of a picture of a fixed longest side, and the whole.

Source: tools/mtmd/models/siglip.cpp in llama.cpp, and Idefics 3's image processor in transformers.
"""

from gguf_io import ModelFile
from gguf_io.media import Size
from gguf_io.pictures import Budget
from models.vision.config import MAX_SIDE, PREFIX, read_vision_config
from models.vision.family import Passes, Rows
from models.vision.layout import ImageLayout, RowRun
from models.vision.pixels import LANCZOS, Pixels, resized, tiles_of
from models.vision.recording import VisionRecording
from models.vision.stages import RowStage, matrix_outputs, record_linear
from models.vision.tower import Style
from models.vision.vit import Vit
from models.weights import WeightLoader

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_PROJECTION = "mm.model.fc"
_USUAL_TILES = 4


class Idefics3(Vit):
    """See models.vision.family.EncoderFamily."""

    def __init__(self, file: ModelFile) -> None:
        config = read_vision_config(file)
        super().__init__(file, config, (config.side // config.patch) ** 2, Style(swapped=True))
        self.width = matrix_outputs(file, f"{_PROJECTION}.weight")
        side = config.side
        # Old files do not state the longest side, which is four tiles in all of these models.
        self._longest = file.metadata.get_int(
            f"{PREFIX}preproc_image_size", _USUAL_TILES * side, minimum=side, maximum=MAX_SIDE
        )

    def layout(self, source: Size, budget: Budget) -> ImageLayout:
        side = self.config.side
        run = RowRun((self.across // self.config.merge) ** 2)
        for longest in range(self._longest, 0, -side):
            columns, rows = (-(-pixels // side) for pixels in _scaled(source, longest))
            if budget.most_tokens is None or (columns * rows + 1) * run.count <= budget.most_tokens or longest <= side:
                break
        whole = (side, side)
        if columns * rows == 1:
            return ImageLayout(source, whole, (_AROUND + _WHOLE, run, _AROUND))
        pieces: list[str | RowRun] = []
        for row in range(rows):
            for column in range(columns):
                line = "\n" if row and not column else ""
                pieces += [f"{line}{_AROUND}<row_{row + 1}_col_{column + 1}>", run]
        pieces += [f"\n\n{_AROUND}{_WHOLE}", run, _AROUND]
        return ImageLayout(source, (columns * side, rows * side), tuple(pieces), (rows, columns), whole)

    def record_projection(self, loader: WeightLoader, recording: VisionRecording) -> RowStage:
        return record_linear(loader, recording, _PROJECTION, self.width, self.config.merge**2 * self.config.width)

    def work(self, layout: ImageLayout) -> float:
        return len(layout.runs) * self.work_of(self.across**2)

    def encode(self, pixels: Pixels, layout: ImageLayout, passes: Passes) -> list[Rows]:
        side = self.config.side
        if layout.overview is None:
            return self.embeddings([resized(pixels, layout.resized, LANCZOS)], passes)
        scaled = resized(pixels, _scaled(layout.source, max(layout.resized)), LANCZOS)
        whole = resized(scaled, layout.resized, LANCZOS)
        return self.embeddings([*tiles_of(whole, side), resized(whole, layout.overview, LANCZOS)], passes)


def _scaled(source: Size, longest: int) -> Size:
    """The size of the same shape with this longest side; the other is even."""
    width, height = source
    shape = width / height
    if width >= height:
        other = int(longest / shape)
        return longest, max(2, other + other % 2)
    other = int(longest * shape)
    return max(2, other + other % 2), longest
