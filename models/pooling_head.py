"""Layers that some files have behind the pooled states: a classification head, or dense layers."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import activations, norms
from cpu_kernels.threads import ThreadTeam
from gguf_io import ModelFile
from gguf_io.pooling import Pooling, pooling_of
from gguf_io.runner_info import LoadProgress
from models.architecture import Architecture
from models.config import ModelConfig
from models.recording import Recording, Rows
from models.steps import Steps, step_fields
from models.weights import Matrix, WeightLoader

_ROWS = 512
_INNER, _CLASSIFIER, _DENSE = "cls", "cls.output", ("dense_2", "dense_3")


class PoolingHead:
    """Layers over pooled rows, often none: dense layers, or those of a reranker, which end in a score.

    A reranker has a layer with tanh, a projection, or both; ModernBERT's layer has GELU and a norm. Qwen 3's score is
    the probability of the first of its answers. width: values of an output row. Not thread-safe.
    """

    def __init__(
        self,
        file: ModelFile,
        loader: WeightLoader,
        config: ModelConfig,
        architecture: Architecture,
        threads: int,
    ) -> None:
        """Record the layers; call `compile` before `run`, once the loader has loaded them."""
        scores = pooling_of(file) is Pooling.RANK
        names = [name for name in ((_INNER, _CLASSIFIER) if scores else _DENSE) if loader.has(f"{name}.weight")]
        self._softmax = scores and architecture.name == "qwen3"
        self._layers = len(names)
        self.builder = loader.new_builder()
        self._size = config.embedding
        if not names:
            self.width = self._size
            return
        outputs = [loader.rows(f"{name}.weight") for name in names]
        self._wide = wide = replace(config, joins=max(outputs), experts=None)
        recording = Recording(self.builder, loader, wide, architecture, _ROWS, threads)
        self._fields = step_fields(self.builder, wide, _ROWS, threads)
        self._in = recording.x.values
        rows, k = recording.x, self._size
        for name, size in zip(names, outputs, strict=True):
            matrix = loader.matrix(f"{name}.weight", size, k)
            rows, k = self._layer(recording, name, matrix, rows, size), size
        self._out, self._outputs = rows.values, k
        self.width = 1 if scores else k

    def compile(self, team: ThreadTeam, progress: LoadProgress | None) -> None:
        """Compile the layers. team: must have the number of threads given at construction."""
        if self._layers:
            self._steps = Steps(self.builder, team, self._wide, self._fields, progress)

    def run(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Apply the layers to pooled rows; return float32[len(rows), width]."""
        if not self._layers:
            return rows
        found = np.empty((len(rows), self.width), np.float32)
        for first in range(0, len(rows), _ROWS):
            part = rows[first : first + _ROWS]
            self._in[: len(part), : self._size] = part
            self._steps.run(len(part))
            out = np.asarray(self._out[: len(part), : self._outputs], np.float32)
            if self._softmax:
                out = np.exp(out - out.max(axis=1, keepdims=True))
                out /= out.sum(axis=1, keepdims=True)
            found[first : first + _ROWS] = out[:, : self.width]
        return found

    def _layer(self, recording: Recording, name: str, matrix: Matrix, rows: Rows, size: int) -> Rows:
        recording.pack(rows.place, matrix)
        out = recording.rows(size)
        recording.product(matrix, out.place, addend=recording.bias(f"{name}.bias", size), last=True)
        if name != _INNER:
            return out
        if recording.architecture.name != "modern-bert":
            cap = activations.SoftCap(
                y=out.address, stride=out.stride, count=out.width, cap=recording.builder.scalar(1.0)
            )
            recording.add(activations.soft_cap, cap)
            return out
        gelu = activations.Activate(y=out.address, stride=out.stride, count=size, kind=activations.GELU_ALONE)
        recording.add(activations.activate, gelu)
        if recording.loader.has(f"{_INNER}.norm.weight"):
            weight = recording.vector(f"{_INNER}.norm.weight", size)
            norm = norms.AddNorm(
                x=out.address,
                x_stride=out.stride,
                y=0,
                y_stride=0,
                weight=weight,
                size=size,
                epsilon=recording.plain_epsilon,
            )
            recording.add(norms.add_norm, norm)
        return out
