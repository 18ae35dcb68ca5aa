"""Records gated delta networks, in place of attention."""

import math

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.delta_net import DeltaNet, Shape, delta_net
from models.kv_pages import PageStore
from models.recording import Recording
from models.sizes.delta_net import DeltaNetSizes
from models.weights import Matrix, filled, ordered, repeated

_LOG2E = math.log2(math.e)


class Layers:
    """Buffers that all delta networks of a model share, and the recording of one layer.

    Rows are ordered by key heads, each with its query, its key and its values, every head padded to whole vectors.
    """

    def __init__(self, recording: Recording, store: PageStore) -> None:
        config = recording.config
        assert isinstance(config.state, DeltaNetSizes)
        assert store.delta is not None
        self._recording, self._states, self._sizes = recording, store.delta, config.state
        sizes = self._sizes
        groups, size = sizes.key_heads, sizes.head_size
        self._of_group = sizes.value_heads // groups
        together = recording.architecture.value_heads_together
        self._across, self._between = (self._of_group, 1) if together else (1, groups)
        # The file's index of each value head: [key head][value head].
        self._heads = np.arange(groups)[:, None] * self._across + np.arange(self._of_group) * self._between
        self._rows = recording.rows(groups * (2 + self._of_group) * sizes.padded)
        self._gates = recording.rows(sizes.value_heads * sizes.padded)
        self._beta, self._alpha = recording.rows(sizes.value_heads), recording.rows(sizes.value_heads)
        self._out = recording.rows(sizes.value_heads * size)
        constants = [config.epsilon, 1 / math.sqrt(size), config.epsilon]
        self._constants = recording.builder.array(np.array(constants, np.float32))

    def record(self, layer: int) -> None:
        """Add delta_net(norm(x)) to x."""
        recording, prefix, sizes = self._recording, f"blk.{layer}.", self._sizes
        loader, builder, states = recording.loader, recording.builder, self._states
        matrices = self._matrices(prefix)
        recording.norm_pack(prefix + "attn_norm", *matrices)
        outputs = (self._rows, self._gates, self._beta, self._alpha)
        for i, (matrix, rows) in enumerate(zip(matrices, outputs, strict=True)):
            recording.product(matrix, rows.place, last=i == len(matrices) - 1)
        groups, heads, size = sizes.key_heads, sizes.value_heads, sizes.head_size
        shape = np.zeros(int(Shape.COUNT), np.int64)
        shape[: Shape.GROUP_PAGES] = (
            *(groups, self._of_group, sizes.padded, size),
            *(sizes.reach, self._across, self._between),
        )
        shape[Shape.GROUP_PAGES :] = states.places
        order = self._heads.reshape(-1)
        biases, rates = loader.vector(prefix + "ssm_dt.bias", heads), loader.vector(prefix + "ssm_a", heads)
        recording.add(
            delta_net,
            DeltaNet(
                shape=builder.array(shape),
                slots=states.address(layer),
                slot_of_page=states.slot_of_page.ctypes.data,
                rows=self._rows.address,
                rows_stride=self._rows.stride,
                gates=self._gates.address,
                gates_stride=self._gates.stride,
                beta=self._beta.address,
                alpha=self._alpha.address,
                beta_stride=self._beta.stride,
                constants=recording.later(
                    (heads, 2), lambda: np.stack([biases()[order], rates()[order] * _LOG2E], axis=1)
                ),
                convolution=self._convolution(prefix),
                norm=recording.vector(prefix + "ssm_norm.weight", size, self._order(np.zeros(1, np.int64))),
                factors=self._constants,
                out=self._out.address,
                out_stride=self._out.stride,
            ),
        )
        outwards = loader.matrix(prefix + "ssm_out.weight", recording.config.embedding, heads * size)
        recording.pack(self._out.place, outwards)
        recording.add_to_residual(outwards, prefix + "ssm_out.bias", "", private=True)

    def _matrices(self, prefix: str) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """The matrices of the convolution's input rows, of the output gates, of beta and of alpha.

        Qwen3-Next's files fuse beta and alpha, by key head, in one tensor; older ones also fuse rows and gates.
        """
        loader, width, sizes = self._recording.loader, self._recording.config.embedding, self._sizes
        groups, size, heads = sizes.key_heads, sizes.head_size, sizes.value_heads
        each = self._of_group
        first = np.arange(groups)[:, None]
        if loader.has(prefix + "ssm_in.weight"):
            starts = first * (2 + 2 * each) + np.arange(2 + 2 * each)
            rows_of = starts[:, : 2 + each] * size, starts[:, 2 + each :] * size
            name, count = prefix + "ssm_in.weight", groups * (2 + 2 * each) * size
            rows, gates = (loader.matrix(name, count, width, self._order(order)) for order in rows_of)
        else:
            rows = loader.matrix(
                prefix + "attn_qkv.weight", self._width, width, self._order(self._heads_of_rows * size)
            )
            gates = loader.matrix(prefix + "attn_gate.weight", heads * size, width, self._order(self._heads * size))
        if loader.has(prefix + "ssm_ba.weight"):
            name, order = prefix + "ssm_ba.weight", (first * 2 * each + np.arange(each)).reshape(-1)
            beta, alpha = (loader.matrix(name, 2 * heads, width, order + more) for more in (0, each))
        else:
            beta, alpha = (
                loader.matrix(f"{prefix}ssm_{name}.weight", heads, width, self._heads.reshape(-1))
                for name in ("beta", "alpha")
            )
        return rows, gates, beta, alpha

    @property
    def _width(self) -> int:
        """Values of a convolution input row in the file's order: all queries, all keys, all values."""
        return (2 * self._sizes.key_heads + self._sizes.value_heads) * self._sizes.head_size

    @property
    def _heads_of_rows(self) -> NDArray[np.int64]:
        """For each key head, the indices in the file's rows of its query, its key and its value heads."""
        groups = self._sizes.key_heads
        first = np.arange(groups)[:, None]
        return np.concatenate([first, first + groups, self._heads + 2 * groups], axis=1)

    def _order(self, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Source indices of the values of padded heads that begin at `firsts`, -1 for padding."""
        return repeated(filled(self._sizes.head_size, self._sizes.padded), firsts)

    def _convolution(self, prefix: str) -> int:
        """Address of the weights of the reach input rows, the oldest first, each in the order of our rows."""
        reach, order = self._sizes.reach, self._order(self._heads_of_rows * self._sizes.head_size)
        read = self._recording.loader.vectors(prefix + "ssm_conv1d.weight", self._width, reach)
        return self._recording.later((reach, len(order)), lambda: ordered(read()[:, :reach].T, order))
