"""Records the feed-forward network: as a layer's only one, or beside experts."""

import numpy as np

from cpu_kernels import activations, altup
from models.architecture import Activation
from models.recording import Recording, Rows
from models.sizes.feed_forward import ALL_COUNT
from models.weights import Matrix

KINDS = {
    Activation.SILU: activations.GATE_SILU,
    Activation.GELU: activations.GATE_GELU,
    Activation.CLAMPED: activations.GATE_CLAMPED,
    Activation.GELU_ALONE: activations.GELU_ALONE,
    Activation.RELU: activations.GATE_RELU,
    Activation.SQUARED_RELU_ALONE: activations.SQUARED_RELU_ALONE,
    Activation.XIELU_ALONE: activations.XIELU_ALONE,
}
"""The numbers of activations for cpu_kernels.activations.gate_pack."""


class FeedForwardLayers:
    """Buffers that all feed-forward layers of a model share, and the recording of one layer."""

    def __init__(self, recording: Recording, width: int) -> None:
        """width: of the network's hidden layer."""
        self._recording, self._width = recording, width
        self._gate, self._up = recording.rows(width, spread=True), recording.rows(width, spread=True)
        self._scores = recording.rows(1)

    def record(self, layer: int) -> None:
        """Add feed_forward(norm(x)) to x, and attention's output if it was set aside."""
        recording, norms, prefix = self._recording, self._recording.architecture.norms, f"blk.{layer}."
        down = self._hidden(layer)
        norm = prefix + (norms.feed_forward_sum if norms.sums else "post_ffw_norm")
        recording.add_to_residual(down, prefix + "ffn_down.bias", norm, private=False)
        if recording.architecture.parallel:
            recording.add_aside()

    def leave_aside(self, layer: int) -> None:
        """Compute feed_forward(norm(x)) into the recording's `aside`."""
        self._recording.leave_aside(self._hidden(layer), f"blk.{layer}.ffn_down.bias", private=False)

    def leave_shared_aside(self, layer: int) -> Rows | None:
        """Compute shared_expert(norm(x)) into `aside`; return the gates for add_aside, None if the file has none."""
        recording, prefix = self._recording, f"blk.{layer}."
        name = prefix + "ffn_gate_inp_shexp.weight"
        router = [recording.loader.matrix(name, 1, recording.config.embedding)] if recording.loader.has(name) else []
        down = self._hidden(layer, "_shexp", *router)
        recording.leave_aside(down, prefix + "ffn_down_shexp.bias", private=False)
        return self._scores if router else None

    def _hidden(self, layer: int, suffix: str = "", *router: Matrix) -> Matrix:
        """Pack the hidden layer for its product with the matrix `down`, which is returned.

        suffix: of the tensors' names. router: a matrix that computes `_scores` from the same rows.
        """
        recording, config, prefix = self._recording, self._recording.config, f"blk.{layer}."
        gate, up, down = self._matrices(prefix, suffix)
        recording.norm_pack(feed_forward_norm(recording, prefix), *gate, up, *router)
        for matrix in router:
            recording.product(matrix, self._scores.place, last=False)
        gate_bias = recording.bias(f"{prefix}ffn_gate{suffix}.bias", self._width)
        up_bias = recording.bias(f"{prefix}ffn_up{suffix}.bias", self._width)
        for matrix in gate:
            recording.product(matrix, self._gate.place, addend=gate_bias, last=False)
        recording.product(up, self._up.place, addend=up_bias, last=True)
        activated = self._gate if gate else self._up
        if config.feed_forward.sparsity[layer] > ALL_COUNT:
            threshold = recording.builder.scalar(config.feed_forward.sparsity[layer])
            arguments = altup.KeepLargest(
                x=activated.address, stride=activated.stride, count=self._width, deviations=threshold
            )
            recording.add(altup.keep_largest, arguments)
        factors = config.feed_forward.xielu[layer] if config.feed_forward.xielu else ()
        beside = recording.builder.array(np.array(factors, np.float32)) if factors else self._up.address
        recording.gate_pack(KINDS[recording.activation], activated, beside, down)
        return down

    def _matrices(self, prefix: str, suffix: str) -> tuple[list[Matrix], Matrix, Matrix]:
        """The gate (if there is one), up and down. Gate and up may be the halves of one tensor."""
        loader, embedding, width = self._recording.loader, self._recording.config.embedding, self._width
        down = loader.matrix(f"{prefix}ffn_down{suffix}.weight", embedding, width)
        gate_name, up_name = f"{prefix}ffn_gate{suffix}.weight", f"{prefix}ffn_up{suffix}.weight"
        if not self._recording.activation.gated:
            return [], loader.matrix(up_name, width, embedding), down
        if loader.has(gate_name):
            return [loader.matrix(gate_name, width, embedding)], loader.matrix(up_name, width, embedding), down
        rows = np.arange(width)
        gate, up = (loader.matrix(up_name, 2 * width, embedding, rows + first) for first in (0, width))
        return [gate], up, down


def feed_forward_norm(recording: Recording, prefix: str) -> str | None:
    """The tensor of the norm before a layer's feed-forward network, None if there is none."""
    norms = recording.architecture.norms
    return prefix + norms.feed_forward if norms.before else None
