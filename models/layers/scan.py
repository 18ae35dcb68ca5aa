"""Records selective scans (Mamba-2), in place of attention or in parallel with it."""

import math

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.norms import NormGroupsPack, norm_groups_pack
from cpu_kernels.records import Barrier
from cpu_kernels.selective_scan import ScanShape, SelectiveScan, selective_scan
from models.kv_pages import PageStore
from models.recording import Recording
from models.sizes.scan import ScanSizes
from models.weights import Matrix, filled, ordered, repeated

_LOG2E = math.log2(math.e)


class Layers:
    """Buffers that all selective scans of a model share, and the recording of one layer.

    One matrix product computes a row: the convolution's inputs (b and c of each group, then x of each head), then the
    gates of each head, all padded to whole vectors, then dt of each head.
    """

    def __init__(self, recording: Recording, store: PageStore) -> None:
        assert isinstance(recording.config.state, ScanSizes)
        assert store.delta is not None
        self._recording, self._states, self._sizes = recording, store.delta, recording.config.state
        sizes = self._sizes
        heads, groups, inner = sizes.heads, sizes.groups, sizes.inner
        of_heads = repeated(filled(sizes.head_size, sizes.padded_head), np.arange(heads) * sizes.head_size)
        both = np.stack([np.arange(groups), np.arange(groups) + groups], axis=1) * sizes.state
        of_groups = repeated(filled(sizes.state, sizes.padded_state), inner + both.reshape(-1))
        # Indices into the file's convolution inputs: x, all b, all c. In its rows, gates come before them and dt after.
        self._order = np.concatenate([of_groups, of_heads])
        self._convolved = inner + 2 * groups * sizes.state
        moved = np.where(self._order >= 0, self._order + inner, -1)
        self._rows_order = np.concatenate([moved, of_heads, inner + self._convolved + np.arange(heads)])
        self._rows, self._out = recording.rows(len(self._rows_order)), recording.rows(inner)

    def record(self, layer: int) -> None:
        """Add scan(norm(x)) to x, or compute it into `aside` if attention still reads x."""
        recording, outwards, bias = self._recording, self._record(layer), f"blk.{layer}.ssm_out.bias"
        if recording.config.attention.attends[layer]:
            recording.leave_aside(outwards, bias, private=True)
        else:
            recording.add_to_residual(outwards, bias, "", private=True)

    def _record(self, layer: int) -> Matrix:
        """Pack scan(norm(x)) for a product with the output matrix, which is returned."""
        recording, prefix, sizes = self._recording, f"blk.{layer}.", self._sizes
        builder, states = recording.builder, self._states
        inwards = recording.loader.matrix(
            prefix + "ssm_in.weight",
            sizes.inner + self._convolved + sizes.heads,
            recording.config.embedding,
            self._rows_order,
        )
        recording.norm_pack(prefix + "attn_norm", inwards)
        recording.product(inwards, self._rows.place, last=True)
        gates = self._rows.address + 4 * len(self._order)
        shape = np.zeros(int(ScanShape.COUNT), np.int64)
        shape[: ScanShape.GROUP_PAGES] = (
            *(sizes.slot_parts, sizes.unit_heads, sizes.slot_parts // sizes.groups),
            *(sizes.padded_state, sizes.padded_head, sizes.head_size, sizes.reach),
        )
        shape[ScanShape.GROUP_PAGES :] = states.places
        recording.add(
            selective_scan,
            SelectiveScan(
                shape=builder.array(shape),
                slots=states.address(layer),
                slot_of_page=states.slot_of_page.ctypes.data,
                rows=self._rows.address,
                stride=self._rows.stride,
                gates=gates,
                dt=gates + 4 * sizes.heads * sizes.padded_head,
                constants=self._constants(prefix),
                convolution=self._convolution(prefix),
                convolution_stride=4 * len(self._order),
                out=self._out.address,
                out_stride=self._out.stride,
            ),
        )
        outwards = recording.loader.matrix(prefix + "ssm_out.weight", recording.config.embedding, sizes.inner)
        if not recording.loader.has(prefix + "ssm_norm.weight") and not recording.architecture.norms.scans:
            recording.pack(self._out.place, outwards)
            return outwards
        size = sizes.inner // sizes.groups
        read = recording.loader.vectors(prefix + "ssm_norm.weight", sizes.groups, size)
        arguments = NormGroupsPack(
            x=self._out.address,
            stride=self._out.stride,
            weight=recording.later((sizes.inner + 16,), lambda: np.pad(read()[:, :size].reshape(-1), (0, 16))),
            size=size,
            parts=sizes.groups,
            forms=outwards.format.form,
            packed=recording.packed,
            epsilon=recording.plain_epsilon,
        )
        recording.add(norm_groups_pack, arguments, barrier=Barrier.MANY_ROWS)
        return outwards

    def _constants(self, prefix: str) -> int:
        """Address of the bias of dt, A in base 2, D, and padding, of each head."""
        loader, heads = self._recording.loader, self._sizes.heads
        biases = loader.vector(prefix + "ssm_dt.bias", heads)
        rates, direct = (loader.vectors(prefix + name, heads, 1) for name in ("ssm_a", "ssm_d"))

        def make() -> NDArray[np.float32]:
            constants = np.zeros((heads, 4), np.float32)
            constants[:, 0], constants[:, 2] = biases()[:heads], direct()[:, 0]
            constants[:, 1] = rates()[:, 0] * _LOG2E
            return constants

        return self._recording.later((heads, 4), make)

    def _convolution(self, prefix: str) -> int:
        """Address of the weights of the reach input rows, the oldest first, then biases: in the order of our rows."""
        loader, reach, order, count = self._recording.loader, self._sizes.reach, self._order, self._convolved
        read, bias = loader.vectors(prefix + "ssm_conv1d.weight", count, reach), prefix + "ssm_conv1d.bias"
        biases = loader.vector(bias, count) if loader.has(bias) else None

        def make() -> NDArray[np.float32]:
            weights = np.zeros((count, reach + 1), np.float32)
            weights[:, :reach] = read()[:, :reach]
            if biases:
                weights[:, reach] = biases()[:count]
            return ordered(weights.T, order)

        return self._recording.later((reach + 1, len(order)), make)
