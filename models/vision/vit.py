"""Encoders with a plain transformer (CLIP, SigLIP, InternViT): patches with learned positions, and a projection."""

from collections.abc import Iterable

import numpy as np

from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from models.vision.config import VisionConfig
from models.vision.family import EncoderFamily, Passes, Rows
from models.vision.pixels import Pixels, patch_rows
from models.vision.recording import VisionRecording
from models.vision.stages import RowStage, record_norm, record_patches
from models.vision.tower import Style, Tower
from models.weights import WeightLoader

POSITIONS = "v.position_embd.weight"
_CLASS = "v.class_embd"


class Vit(EncoderFamily):
    """What these families share. most: patches of the largest picture that is encoded at once."""

    def __init__(self, file: ModelFile, config: VisionConfig, most: int, style: Style) -> None:
        self.config = config
        self._has_class = _CLASS in file.tensors
        self._tower = tower = Tower(file, config, most + 1, style)
        self.longest = max(tower.longest, 3 * config.patch**2, config.merge**2 * config.width)
        self.longest_head, self.pass_rows = tower.longest_head, tower.pass_rows
        self.picture_bytes = most * (tower.row_bytes + 24 * config.patch**2 + 8 * config.width)
        if config.side % (config.patch * config.merge) or not config.side:
            raise ModelFileError(
                f"{file.path}: a picture of {config.side} pixels cannot be divided into patches of {config.patch} and "
                f"squares of {config.merge}. Convert the model again or use another version of it."
            )

    @property
    def across(self) -> int:
        """Patches along a side of the picture that the encoder was trained with."""
        return self.config.side // self.config.patch

    def record(self, loader: WeightLoader, recording: VisionRecording) -> None:
        config = self.config
        self._patches = record_patches(loader, recording, config)
        self._positions = loader.array(POSITIONS, self.across**2 + self._has_class, config.width)
        self._class = loader.array(_CLASS, config.width) if self._has_class else None
        self._first = record_norm(recording, "v.pre_ln", config, rms=self._tower.style.rms)
        self._tower.record(recording)
        self._last = record_norm(recording, "v.post_ln", config, rms=self._tower.style.rms)
        self._project = self.record_projection(loader, recording)

    def record_projection(self, loader: WeightLoader, recording: VisionRecording) -> RowStage:
        """The layers from what `squares` or the like makes of states to rows of embeddings."""
        raise NotImplementedError

    def positions(self, lines: int, columns: int) -> Rows:
        """Learned positions of a picture's patches; families with pictures of any shape stretch them."""
        assert lines == columns == self.across
        return np.asarray(self._positions[int(self._has_class) :], np.float32)

    def work_of(self, patches: int) -> float:
        """The sum of shares of passes for one picture."""
        norms = sum(norm.work for norm in (self._first, self._last) if norm)
        rows = patches + self._has_class
        tokens = patches / self.config.merge**2
        return patches * self._patches.work + rows * norms + self._tower.work(rows) + tokens * self._project.work

    def states(self, picture: Pixels, passes: Passes) -> Rows:
        """The states of a picture's patches in reading order: float32[patches, width]."""
        config = self.config
        lines, columns = picture.shape[0] // config.patch, picture.shape[1] // config.patch
        x = self._patches.run(patch_rows(picture, config.patch, config), passes) + self.positions(lines, columns)
        if self._class is not None:
            x = np.concatenate([(self._class + self._positions[0])[None], x])
        if self._first:
            x = self._first.run(x, passes)
        self._tower.run(x, passes)
        if self._last:
            x = self._last.run(x, passes)
        return x[int(self._has_class) :]

    def embeddings(self, pictures: Iterable[Pixels], passes: Passes) -> list[Rows]:
        """The rows of embeddings of each picture, whose squares of patches become one row each."""
        found = []
        for picture in pictures:
            lines, columns = (side // self.config.patch for side in picture.shape[:2])
            merged = squares(self.states(picture, passes), lines, columns, self.config.merge)
            found.append(self._project.run(merged, passes))
        return found


def squares(x: Rows, lines: int, columns: int, merge: int) -> Rows:
    """The states of each square of merge x merge patches side by side: float32[squares, merge * merge * width].

    Squares at the right and lower edge are filled with zeros.
    """
    width = x.shape[1]
    down, across = -(-lines // merge), -(-columns // merge)
    grid = np.zeros((down * merge, across * merge, width), np.float32)
    grid[:lines, :columns] = x.reshape(lines, columns, width)
    parts = grid.reshape(down, merge, across, merge, width).swapaxes(1, 2)
    return parts.reshape(down * across, merge**2 * width)
