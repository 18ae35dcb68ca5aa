"""Records Gemma 3n's parallel residual streams (AltUp), and the low-rank path beside attention (Laurel)."""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import altup
from models.errors import UnsupportedModelError
from models.layers.per_layer_inputs import PerLayerInputs
from models.recording import Place, Recording
from models.weights import Matrix

_LAUREL = "blk.0.laurel_l.weight"


class AltUpStreams:
    """The streams of all rows, from the embedding to their mean, which gives the logits.

    Order in each layer: `predict`, attention, `add_aside`, the feed-forward network, `correct`. planes: float32
    [stream][row][values].
    """

    def __init__(self, recording: Recording, inputs: PerLayerInputs | None) -> None:
        """Raises UnsupportedModelError if layers compute with another stream than the first, or get no inputs."""
        config = recording.config
        self._count, active = config.per_layer.streams, config.per_layer.active
        if active or inputs is None:
            raise UnsupportedModelError(
                f"The native engine computes models of the architecture {config.architecture} only where layers work "
                "on the first of the parallel streams and have embeddings of their own.",
                remedy="Use --backend llama.",
            )
        self._recording, self._inputs = recording, inputs
        self.planes, self._predicted = (recording.planes(self._count, recording.x.width) for _ in range(2))
        self._gated = recording.rows(config.embedding)
        self._rank = recording.loader.rows(_LAUREL) if recording.loader.has(_LAUREL) else 0
        self._low = recording.rows(max(self._rank, 1))
        self._half = recording.builder.scalar(math.sqrt(0.5))

    def spread(self) -> None:
        """Compute the streams from the tokens' embeddings, which are in x."""
        recording, x = self._recording, self._recording.x
        for number, matrix in enumerate(self._projections("altup_proj.weight"), 1):
            recording.pack(x.place, matrix)
            recording.product(matrix, self._plane(self.planes, number), last=True)
        recording.add(altup.spread, altup.Spread(x=x.address, x_stride=x.stride, **self._shape("streams", self.planes)))

    def merge(self) -> None:
        """Write the mean of the streams to x."""
        recording, x = self._recording, self._recording.x
        for number, matrix in enumerate(self._projections("altup_unembd_proj.weight"), 1):
            recording.pack(self._plane(self.planes, number), matrix)
            recording.product(matrix, self._plane(self._predicted, number), last=True)
        first = self.planes.ctypes.data
        others = self._shape("others", self._predicted)
        recording.add(altup.merge, altup.Merge(x=x.address, x_stride=x.stride, first=first, **others))

    def predict(self, layer: int) -> None:
        """Predict the layer's output of every stream, the first into x; compute the low-rank path into `aside`."""
        recording, x = self._recording, self._recording.x
        matrix = self._coefficients(f"blk.{layer}.altup_predict_coef.weight", self._count**2)
        recording.add(
            altup.predict,
            altup.Predict(
                **self._shape("streams", self.planes),
                router=self._router(layer),
                coefficients=matrix,
                predictions=self._predicted.ctypes.data,
                x=x.address,
                x_stride=x.stride,
                epsilon=recording.plain_epsilon,
            ),
        )
        prefix, loader, embedding = f"blk.{layer}.", recording.loader, recording.config.embedding
        down = loader.matrix(prefix + "laurel_l.weight", self._rank, embedding)
        up = loader.matrix(prefix + "laurel_r.weight", embedding, self._rank)
        recording.norm_pack(prefix + "attn_norm", down)
        recording.product(down, self._low.place, last=True)
        recording.pack(self._low.place, up)
        recording.leave_aside(up, "", private=True)
        recording.normalise(recording.aside.place, prefix + "laurel_post_norm", embedding)
        recording.norm_add(recording.aside, x, prefix + "attn_norm")

    def add_aside(self) -> None:
        """x = (x + aside) / sqrt(2)."""
        self._recording.add_aside()
        self._recording.scale(self._half)

    def correct(self, layer: int) -> None:
        """Correct the predictions with the layer's output of the first stream; add the layer's input to the others."""
        recording, prefix = self._recording, f"blk.{layer}."
        loader, embedding, x = recording.loader, recording.config.embedding, recording.x
        recording.add(
            altup.correct,
            altup.Correct(
                x=x.address,
                x_stride=x.stride,
                **self._shape("predictions", self._predicted),
                router=self._router(layer),
                coefficients=self._coefficients(prefix + "altup_correct_coef.weight", self._count),
                streams=self.planes.ctypes.data,
                gated=self._gated.address,
                gated_stride=self._gated.stride,
                weight=recording.vector(prefix + "altup_correct_scale.weight", embedding),
                epsilon=recording.plain_epsilon,
            ),
        )
        self._inputs.gate(layer, self._gated)
        projection = loader.matrix(prefix + "proj.weight", embedding, recording.config.per_layer.width)
        found = recording.sublayer
        recording.product(projection, found.place, last=True, private=False)
        weight = recording.vector(prefix + "post_norm.weight", embedding)
        arguments = altup.AddToOthers(
            **self._shape("streams", self.planes),
            y=found.address,
            y_stride=found.stride,
            weight=weight,
            epsilon=recording.plain_epsilon,
        )
        recording.add(altup.add_to_others, arguments)

    def _shape(self, name: str, planes: NDArray[np.generic]) -> dict[str, int]:
        """A kernel's arguments about streams, of which `name` is the address."""
        stream_bytes, row_bytes = planes.strides[:2]
        sizes = {"stream_bytes": stream_bytes, "row_bytes": row_bytes, "count": self._count}
        return {name: planes.ctypes.data, **sizes, "k": self._recording.config.embedding}

    def _plane(self, planes: NDArray[np.generic], number: int) -> Place:
        return Place(planes[number].ctypes.data, planes.strides[1])

    def _projections(self, name: str) -> list[Matrix]:
        """The matrices of all streams but the first, which are stored in one tensor."""
        embedding, others = self._recording.config.embedding, self._count - 1
        together = self._recording.loader.matrix(name, embedding, embedding, experts=others)
        size = together.expert_bytes
        return [replace(together, address=together.address + i * size, experts=0) for i in range(others)]

    def _router(self, layer: int) -> int:
        """Address of the router's rows, multiplied by the weights of the norm before it and divided by the width."""
        recording, prefix = self._recording, f"blk.{layer}.altup_router"
        embedding = recording.config.embedding
        norm = recording.loader.vector(f"{prefix}_norm.weight", embedding)
        rows = recording.loader.vectors(f"{prefix}.weight", self._count, embedding)
        width = -(-embedding // 16) * 16
        return recording.later((self._count, width), lambda: (rows() * norm() / embedding)[:, :width])

    def _coefficients(self, name: str, count: int) -> int:
        read = self._recording.loader.vectors(name, count, self._count)
        return self._recording.later((count, self._count), lambda: read()[:, : self._count])
