"""Records Kimi delta attention, in place of attention."""

import math

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.kda import KdaShape, KimiDelta, kda
from models.kv_pages import PageStore
from models.recording import Place, Recording, Rows
from models.sizes.kda import KdaSizes
from models.weights import Read, filled, padded, repeated

_LOG2E = math.log2(math.e)
_PARTS = "qkv"


class Layers:
    """Buffers that all layers of a model share, and the recording of one layer. Heads are padded to whole vectors."""

    def __init__(self, recording: Recording, store: PageStore) -> None:
        config = recording.config
        assert isinstance(config.state, KdaSizes)
        assert store.delta is not None
        self._recording, self._states, self._sizes = recording, store.delta, config.state
        heads, size = self._sizes.heads, self._sizes.head_size
        self._order = repeated(filled(size, self._sizes.padded), np.arange(heads) * size)
        self._part = padded(len(self._order))
        self._rows = recording.rows(len(_PARTS) * self._part)
        self._decay, self._gates = recording.rows(self._part), recording.rows(self._part)
        self._decay_ranks, self._gate_ranks = recording.rows(size), recording.rows(size)
        self._beta, self._out = recording.rows(heads), recording.rows(heads * size)
        factors = [config.epsilon, 1 / math.sqrt(size), config.epsilon]
        self._factors = recording.builder.array(np.array(factors, np.float32))

    def record(self, layer: int) -> None:
        """Add kda(norm(x)) to x."""
        recording, prefix, sizes, states = self._recording, f"blk.{layer}.", self._sizes, self._states
        loader, builder, width = recording.loader, recording.builder, recording.config.embedding
        self._products(prefix)
        shape = np.zeros(int(KdaShape.COUNT), np.int64)
        shape[: KdaShape.REACH + 1] = sizes.heads, sizes.padded, sizes.head_size, sizes.reach
        shape[KdaShape.GROUP_PAGES :] = states.places
        rates, of_head = self._values(prefix + "ssm_a", 1, sizes.heads), filled(sizes.head_size, sizes.padded)
        recording.add(
            kda,
            KimiDelta(
                shape=builder.array(shape),
                slots=states.address(layer),
                slot_of_page=states.slot_of_page.ctypes.data,
                rows=self._rows.address,
                rows_stride=self._rows.stride,
                part_bytes=4 * self._part,
                decay=self._decay.address,
                decay_stride=self._decay.stride,
                gates=self._gates.address,
                gates_stride=self._gates.stride,
                beta=self._beta.address,
                beta_stride=self._beta.stride,
                biases=recording.vector(prefix + "ssm_dt.bias", sizes.inner, self._order),
                rates=recording.later((sizes.heads,), lambda: rates().reshape(-1) * np.float32(_LOG2E)),
                convolution=self._convolution(prefix),
                norm=recording.vector(prefix + "ssm_norm.weight", sizes.head_size, of_head),
                factors=self._factors,
                out=self._out.address,
                out_stride=self._out.stride,
            ),
        )
        outwards = loader.matrix(prefix + "attn_output.weight", width, sizes.inner)
        recording.pack(self._out.place, outwards)
        recording.add_to_residual(outwards, prefix + "attn_output.bias", "", private=True)

    def _products(self, prefix: str) -> None:
        """Compute the convolution's inputs and beta, and through their low ranks the decay and the gates."""
        recording, sizes, width = self._recording, self._sizes, self._recording.config.embedding
        loader, inner, size = recording.loader, sizes.inner, sizes.head_size
        inputs = [loader.matrix(f"{prefix}attn_{part}.weight", inner, width, self._order) for part in _PARTS]
        products = [
            (matrix, Place(self._rows.address + 4 * number * self._part, self._rows.stride))
            for number, matrix in enumerate(inputs)
        ]
        products += [
            (loader.matrix(prefix + "ssm_f_a.weight", size, width), self._decay_ranks.place),
            (loader.matrix(prefix + "ssm_g_a.weight", size, width), self._gate_ranks.place),
            (loader.matrix(prefix + "ssm_beta.weight", sizes.heads, width), self._beta.place),
        ]
        recording.norm_pack(prefix + "attn_norm", *(matrix for matrix, _ in products))
        for number, (matrix, out) in enumerate(products, 1):
            recording.product(matrix, out, last=number == len(products))
        ranks: tuple[tuple[str, Rows, Rows], ...] = (
            ("ssm_f_b", self._decay_ranks, self._decay),
            ("ssm_g_b", self._gate_ranks, self._gates),
        )
        for name, low, out_rows in ranks:
            matrix = loader.matrix(f"{prefix}{name}.weight", inner, size, self._order)
            recording.pack(low.place, matrix)
            recording.product(matrix, out_rows.place, last=True)

    def _convolution(self, prefix: str) -> int:
        """Address of the weights [head][row, the oldest first][query, key, value]."""
        sizes = self._sizes
        reads = [self._values(f"{prefix}ssm_conv1d_{part}.weight", sizes.inner, sizes.reach) for part in _PARTS]
        shape = sizes.heads, sizes.reach, len(_PARTS), sizes.padded

        def make() -> NDArray[np.float32]:
            weights = np.zeros(shape, np.float32)
            for number, read in enumerate(reads):
                by_head = read().reshape(sizes.heads, sizes.head_size, sizes.reach)
                weights[:, :, number, : sizes.head_size] = by_head.swapaxes(1, 2)
            return weights

        return self._recording.later(shape, make)

    def _values(self, name: str, *shape: int) -> Read:
        """A tensor whose file may have further dimensions of 1."""
        loader, stored = self._recording.loader, self._recording.loader.shape(name) or ()
        alike = [size for size in stored if size > 1] == [size for size in shape if size > 1]
        return loader.values(name, *(stored if alike else shape))
