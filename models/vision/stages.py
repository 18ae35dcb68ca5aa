"""Steps of an encoder beside its transformer: from rows to rows, a pass at a time."""

from dataclasses import dataclass

import numpy as np

from models.recording import Rows as Buffer
from models.vision.config import VisionConfig
from models.vision.family import Passes, Rows
from models.vision.recording import Part, VisionRecording
from models.weights import WeightLoader

PATCHES, PATCH_BIAS = "v.patch_embd.weight", "v.patch_embd.bias"


@dataclass
class RowStage:
    """A part of a program that reads the rows in one buffer and leaves its results in another.

    inputs, outputs: values of a row in each. work: operations of a row.
    """

    part: Part
    source: Buffer
    inputs: int
    target: Buffer
    outputs: int
    work: float

    def run(self, rows: Rows, passes: Passes) -> Rows:
        """float32[rows, inputs] to float32[rows, outputs]."""
        found = np.empty((len(rows), self.outputs), np.float32)
        for first in range(0, len(rows), passes.most):
            some = rows[first : first + passes.most]
            self.source.values[: len(some), : self.inputs] = some
            passes.run(self.part, len(some), self.work * len(some))
            found[first : first + len(some)] = self.target.values[: len(some), : self.outputs]
        return found


def record_patches(loader: WeightLoader, recording: VisionRecording, config: VisionConfig, *more: str) -> RowStage:
    """The convolution of patches, with the sum of several kernels if more names are given: from pixels to rows."""
    shape = config.width, 3, config.patch, config.patch
    kernel = sum((loader.values(name, *shape) for name in more), loader.values(PATCHES, *shape))
    pixels = kernel[0].size
    matrix = loader.matrix_of(PATCHES, np.ascontiguousarray(kernel.reshape(config.width, pixels)))
    source, target = recording.rows(pixels), recording.rows(config.width)
    with recording.part() as part:
        recording.pack(source.place, matrix)
        recording.product(matrix, target, addend=recording.bias(PATCH_BIAS, config.width))
    return RowStage(part, source, pixels, target, config.width, 2.0 * pixels * config.width)


def record_norm(recording: VisionRecording, norm: str, config: VisionConfig, *, rms: bool = False) -> RowStage | None:
    """A norm of whole rows; None if the file has none of that name (without .weight)."""
    if not recording.loader.has(f"{norm}.weight"):
        return None
    rows = recording.rows(config.width)
    with recording.part() as part:
        if rms:
            recording.rms_norm(rows, norm, config.width, config.epsilon)
        else:
            recording.layer_norm(rows, norm, config.width, config.epsilon)
    return RowStage(part, rows, config.width, rows, config.width, 8.0 * config.width)
