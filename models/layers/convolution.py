"""Records short convolutions, in place of attention."""

import numpy as np

from cpu_kernels.short_convolution import ShortConvolution, short_convolution
from models.kv_pages import PageStore
from models.recording import Recording
from models.sizes.convolution import ConvolutionSizes
from models.weights import filled, padded, repeated

_PARTS = 3  # of a convolution's input: b, c and x


class Layers:
    """Buffers that all convolutions of a model share, and the recording of one layer."""

    def __init__(self, recording: Recording, store: PageStore) -> None:
        assert isinstance(recording.config.state, ConvolutionSizes)
        assert store.states is not None
        self._recording, self._states, self._reach = recording, store.states, recording.config.state.reach
        width = recording.config.embedding
        self._width = padded(width)
        self._rows = recording.rows(_PARTS * self._width)
        # The parts of a row, each padded, so that no vector spans two parts.
        self._order = repeated(filled(width, self._width), np.arange(_PARTS) * width)

    def record(self, layer: int) -> None:
        """Add convolution(norm(x)) to x."""
        recording, prefix = self._recording, f"blk.{layer}."
        loader, width, reach = recording.loader, recording.config.embedding, self._reach
        inwards = loader.matrix(prefix + "shortconv.in_proj.weight", _PARTS * width, width, self._order)
        recording.norm_pack(prefix + "attn_norm", inwards)
        recording.product(inwards, self._rows.place, last=True)
        read, more = loader.vectors(prefix + "shortconv.conv.weight", width, reach), self._width - width
        recording.add(
            short_convolution,
            ShortConvolution(
                rows=self._rows.address,
                stride=self._rows.stride,
                width_bytes=4 * self._width,
                weights=recording.later((reach, self._width), lambda: np.pad(read()[:, :reach].T, ((0, 0), (0, more)))),
                reach=reach,
                vectors=self._width // 16,
                **self._states.arguments(layer),
            ),
        )
        outwards = loader.matrix(prefix + "shortconv.out_proj.weight", width, width)
        recording.pack(self._rows.place, outwards)
        recording.add_to_residual(outwards, prefix + "shortconv.out_proj.bias", "", private=True)
