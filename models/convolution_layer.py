"""Short convolutions as operations, in place of attention: the products before and after, and what lies between."""

import numpy as np

from cpu_kernels.records import Barrier
from cpu_kernels.short_convolution import short_convolution
from models.convolution_states import ConvolutionStates
from models.recording import Recording
from models.weights import padded

_PARTS = 3


class ConvolutionLayers:
    """Buffers that all convolutions of a model share, and the recording of one layer."""

    def __init__(self, recording: Recording, states: ConvolutionStates) -> None:
        self._recording, self._states = recording, states
        width = recording.config.embedding
        self._width = padded(width)
        self._rows = recording.rows(_PARTS * self._width)
        # The parts of a row, each padded, so that vectors of one never reach into the next.
        one = np.concatenate([np.arange(width), np.full(self._width - width, -1)])
        self._order = np.concatenate([np.where(one >= 0, one + part * width, -1) for part in range(_PARTS)])

    def record(self, layer: int) -> None:
        """Add convolution(norm(x)) to x."""
        recording, prefix = self._recording, f"blk.{layer}."
        config, loader, builder = recording.config, recording.loader, recording.builder
        width, reach = config.embedding, config.convolution
        inwards = loader.matrix(prefix + "shortconv.in_proj.weight", _PARTS * width, width, self._order)
        recording.norm_pack(prefix + "attn_norm", inwards.format.form)
        recording.product(inwards, self._rows, last=True)
        weights = np.zeros((reach, self._width), np.float32)
        weights[:, :width] = loader.vectors(prefix + "shortconv.conv.weight", width, reach)[:, :reach].T
        builder.add(
            short_convolution,
            self._rows.address,
            self._rows.stride,
            4 * self._width,
            builder.array(weights),
            reach,
            self._width // 16,
            *self._states.arguments(layer),
            barrier=Barrier.ALWAYS,
        )
        outwards = loader.matrix(prefix + "shortconv.out_proj.weight", width, width)
        recording.pack(self._rows, width, outwards.format.form, stride=self._rows.stride)
        recording.add_to_residual(outwards, prefix + "shortconv.out_proj.bias", "", private=True)
