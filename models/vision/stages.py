"""Steps of an encoder beside its transformer: from rows to rows, a pass at a time."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from cpu_kernels import activations
from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from models.recording import Rows as Buffer
from models.vision.config import VisionConfig
from models.vision.family import Passes, Rows
from models.vision.recording import OperationRange, VisionRecording
from models.weights import WeightLoader

PATCHES, PATCH_BIAS = "v.patch_embd.weight", "v.patch_embd.bias"
TORCH_EPSILON = 1e-5
"""PyTorch's default for LayerNorm."""


@dataclass
class RowStage:
    """A part of a program that reads the rows in one buffer and leaves its results in another.

    inputs, outputs: values of a row in each. work: operations of a row.
    """

    part: OperationRange
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
    pixels = 3 * config.patch**2
    reads = [loader.values(name, config.width, 3, config.patch, config.patch) for name in (PATCHES, *more)]
    matrix = loader.matrix_of(
        PATCHES, config.width, pixels, lambda: np.add.reduce([read() for read in reads]).reshape(config.width, pixels)
    )
    source, target = recording.rows(pixels), recording.rows(config.width)
    with recording.part() as part:
        recording.pack(source.place, matrix)
        recording.product(matrix, target, addend=recording.bias(PATCH_BIAS, config.width))
    return RowStage(part, source, pixels, target, config.width, 2.0 * pixels * config.width)


def record_norm(recording: VisionRecording, norm: str, config: VisionConfig, *, rms: bool = False) -> RowStage | None:
    """A norm of whole rows; None if the file has none of that name (without .weight)."""
    if not recording.loader.has(f"{norm}.weight"):
        return None
    return needed_norm(recording, norm, config, rms=rms)


def needed_norm(recording: VisionRecording, norm: str, config: VisionConfig, *, rms: bool = False) -> RowStage:
    """A norm of whole rows, named without .weight."""
    rows = recording.rows(config.width)
    with recording.part() as part:
        if rms:
            recording.rms_norm(rows, norm, config.width, config.epsilon)
        else:
            recording.layer_norm(rows, norm, config.width, config.epsilon)
    return RowStage(part, rows, config.width, rows, config.width, 8.0 * config.width)


def record_mlp(
    loader: WeightLoader,
    recording: VisionRecording,
    names: tuple[str, str],
    inputs: int,
    *,
    norm: str = "",
    epsilon: float = TORCH_EPSILON,
) -> RowStage:
    """Two layers with GELU in between, named without .weight; their biases, if the file has them.

    inputs: values of a row. norm: of a LayerNorm before the first layer, with its epsilon; empty for none.
    """
    first, second = (f"{name}.weight" for name in names)
    hidden, outputs = (loader.rows(name) if loader.has(name) else 0 for name in (first, second))
    up, down = loader.matrix(first, hidden, inputs), loader.matrix(second, outputs, hidden, widen=True)
    source, inner, target = recording.rows(inputs), recording.rows(down.k), recording.rows(outputs)
    with recording.part() as part:
        if norm:
            recording.layer_norm_pack(source.place, norm, epsilon, up)
        else:
            recording.pack(source.place, up)
        recording.product(up, inner, addend=recording.bias(f"{names[0]}.bias", hidden))
        recording.gate_pack(activations.GELU_ALONE, inner, inner, down)
        recording.product(down, target, addend=recording.bias(f"{names[1]}.bias", outputs))
    return RowStage(part, source, inputs, target, outputs, 2.0 * hidden * (inputs + outputs))


def record_linear(
    loader: WeightLoader,
    recording: VisionRecording,
    name: str,
    outputs: int,
    inputs: int,
    norm: int = 0,
    epsilon: float = 0.0,
) -> RowStage:
    """One layer, named without .weight; its bias, if the file has one.

    norm: address of the weights of an RMSNorm before it, with its epsilon; 0 for none.
    """
    matrix = loader.matrix(f"{name}.weight", outputs, inputs)
    source, target = recording.rows(inputs), recording.rows(outputs)
    with recording.part() as part:
        pack = partial(recording.pack, source.place, weight=norm, epsilon=epsilon)
        recording.multiply(pack, (name, matrix, target, recording.bias(f"{name}.bias", outputs)))
    return RowStage(part, source, inputs, target, outputs, 2.0 * inputs * outputs)


def matrix_outputs(file: ModelFile, name: str) -> int:
    """Rows of a matrix. Raises ModelFileError if it is missing."""
    if name not in file.tensors:
        raise ModelFileError(f"{file.path}: the tensor {name} is missing. Use another version of the model.")
    return file.tensors[name].shape[0]
