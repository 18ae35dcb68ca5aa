"""Records the operations of image encoders, which are run part by part on a few hundred rows at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import activations, norms, sums
from cpu_kernels.activations import GatePack, LimitRows
from cpu_kernels.norms import AddNorm, LayerNormPack, NormHeads, NormRows
from cpu_kernels.records import Barrier
from cpu_kernels.sums import AddRows
from models.errors import UnsupportedModelError
from models.recording import NOTHING, Place, Rows, forms, pack_arguments, packed_activations, product_arguments
from models.sizes.attention import Heads
from models.weights import Matrix, WeightLoader, padded

_MOST_ROWS, _LEAST_ROWS = 512, 64
_PASS_OPERATIONS = 16e9
"""Multiplications and additions of a pass: some tenths of a second of one slow core."""


def rows_of_a_pass(operations_per_row: float) -> int:
    """Rows that are computed between two looks at whether the work is still wanted."""
    rows = int(_PASS_OPERATIONS / max(operations_per_row, 1.0)) // _LEAST_ROWS * _LEAST_ROWS
    return min(max(rows, _LEAST_ROWS), _MOST_ROWS)


@dataclass
class OperationRange:
    """Consecutive operations of a program: the index of the first, and how many there are."""

    first: int = 0
    count: int = 0


class VisionRecording:
    """Methods that record an encoder's operations, and the buffers that they share.

    max_rows: of a pass. longest: values of the longest input row of any matrix product.
    """

    def __init__(self, loader: WeightLoader, max_rows: int, longest: int, threads: int) -> None:
        self.builder, self.loader, self.max_rows = loader.builder, loader, max_rows
        self._packed = packed_activations(self.builder, max_rows, longest, threads)

    @contextmanager
    def part(self) -> Iterator[OperationRange]:
        """The operations that are recorded in the context, complete when it ends."""
        part = OperationRange(first=len(self.builder.operations))
        yield part
        part.count = len(self.builder.operations) - part.first

    def rows(self, width: int) -> Rows:
        """A buffer of rows."""
        return Rows(self.builder, self.max_rows, width, spread=True)

    def vector(self, name: str, size: int, order: NDArray[np.int64] | None = None) -> int:
        """Load a vector, reordered if an order is given; return its address."""
        shape = (padded(size if order is None else len(order)),)
        return self.loader.later(shape, self.loader.vector(name, size, order)).ctypes.data

    def bias(self, name: str, size: int, order: NDArray[np.int64] | None = None) -> Place:
        """A bias as the addend of a product; NOTHING if the file has none."""
        return Place(self.vector(name, size, order), 0) if self.loader.has(name) else NOTHING

    def product(self, matrix: Matrix, out: Rows, *, addend: Place = NOTHING, last: bool = True) -> None:
        """out = matrix * packed rows + addend. last: end with a barrier, if products that run concurrently follow."""
        if matrix.scale:
            raise UnsupportedModelError(
                f"The native engine does not support image encoders with the tensor {matrix.scale}.",
                remedy="llama.cpp may: use --backend llama.",
            )
        arguments = product_arguments(matrix, out.place, self._packed, addend, private=False)
        self.builder.add(matrix.format.matmul, arguments, barrier=Barrier.ALWAYS if last else Barrier.NEVER)

    def multiply(self, pack: Callable[..., None], *products: tuple[str, Matrix, Rows, Place]) -> None:
        """Record the products of matrices with the same rows, within the limits that the file states for them.

        pack: packs the rows for matrices, within `limits` (an address, or 0). products: the tensor's name without
        .weight, the matrix, where its product goes, and its bias.
        """
        limited = any(self.loader.has(f"{name}.input_max") for name, *_ in products)
        for some in [[one] for one in products] if limited else [products]:
            pack(*(matrix for _, matrix, _, _ in some), limits=self.limits(some[0][0], "input"))
            for number, (_, matrix, out, bias) in enumerate(some, 1):
                self.product(matrix, out, addend=bias, last=number == len(some))
        for name, _, out, _ in products:
            if limits := self.limits(name, "output"):
                arguments = LimitRows(y=out.address, stride=out.stride, count=out.width, limits=limits)
                self.builder.add(activations.limit_rows, arguments)

    def limits(self, name: str, side: str) -> int:
        """Address of the least and the greatest value of a matrix's "input" or "output", 0 if the file has none.

        Source: Gemma4ClippableLinear in transformers.
        """
        if not self.loader.has(f"{name}.{side}_max"):
            return 0
        ends = [self.loader.values(f"{name}.{side}_{end}", 1) for end in ("min", "max")]
        return self.loader.later((2,), lambda: np.concatenate([read() for read in ends])).ctypes.data

    def pack(self, rows: Place, *matrices: Matrix, weight: int = 0, epsilon: float = 0.0, limits: int = 0) -> None:
        """Pack rows for these matrices, normalised by RMSNorm with the weights at an address unless it is 0."""
        arguments = pack_arguments(rows, weight, self.builder.scalar(epsilon), self._packed, *matrices, limits=limits)
        self.builder.add(activations.norm_pack, arguments)

    def ones(self, size: int) -> int:
        """Address of the weights of a norm that has none."""
        values = np.zeros(padded(size), np.float32)
        values[:size] = 1
        return self.builder.array(values)

    def layer_norm_pack(self, rows: Place, norm: str, epsilon: float, *matrices: Matrix, limits: int = 0) -> None:
        """Pack rows for these matrices, normalised by LayerNorm with the tensor `norm`, without .weight."""
        size = matrices[0].k
        arguments = LayerNormPack(
            x=rows.address,
            stride=rows.stride,
            weight=self.vector(f"{norm}.weight", size),
            bias=self.bias(f"{norm}.bias", size).address,
            k=size,
            forms=forms(*matrices),
            packed=self._packed,
            epsilon=self.builder.scalar(epsilon),
            limits=limits,
        )
        self.builder.add(norms.layer_norm_pack, arguments)

    def layer_norm(self, rows: Rows, norm: str, size: int, epsilon: float, *, plus: Rows | None = None) -> None:
        """rows = LayerNorm(rows + plus), with the tensor `norm`, without .weight."""
        addend = plus.place if plus else NOTHING
        arguments = AddNorm(
            x=rows.address,
            x_stride=rows.stride,
            y=addend.address,
            y_stride=addend.stride,
            weight=self.vector(f"{norm}.weight", size),
            bias=self.bias(f"{norm}.bias", size).address,
            size=size,
            epsilon=self.builder.scalar(epsilon),
        )
        self.builder.add(norms.add_norm, arguments)

    def rms_norm(self, rows: Rows, norm: str, size: int, epsilon: float) -> None:
        """rows = RMSNorm(rows), likewise."""
        arguments = NormRows(
            x=rows.address,
            stride=rows.stride,
            weight=self.vector(f"{norm}.weight", size),
            size=size,
            padded=-(-size // 16) * 16,
            epsilon=self.builder.scalar(epsilon),
        )
        self.builder.add(norms.norm_rows, arguments)

    def add_rows(self, to: Rows, rows: Rows, size: int) -> None:
        """to += rows."""
        arguments = AddRows(x=to.address, x_stride=to.stride, y=rows.address, y_stride=rows.stride, count=size)
        self.builder.add(sums.add_rows, arguments)

    def norm_heads(self, rows: Rows, heads: Heads, epsilon: float) -> None:
        """rows = RMSNorm(rows), head by head, without weights."""
        arguments = NormHeads(
            x=rows.address,
            heads=heads.keys,
            weight=self.ones(heads.size),
            padded=heads.padded,
            size=heads.size,
            epsilon=self.builder.scalar(epsilon),
        )
        self.builder.add(norms.norm_heads, arguments)

    def gate_pack(self, kind: int, gate: Rows, up: Rows, matrix: Matrix, *, limits: int = 0) -> None:
        """Pack activation(gate) * up for a matrix. kind: an activation of cpu_kernels.activations."""
        arguments = GatePack(
            gate=gate.address,
            up=up.address,
            stride=gate.stride,
            k=matrix.k,
            forms=matrix.format.form,
            packed=self._packed,
            kind=kind,
            limits=limits,
        )
        self.builder.add(activations.gate_pack, arguments)
