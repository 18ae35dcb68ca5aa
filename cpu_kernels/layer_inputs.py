"""Layers' own inputs of each token, rows of images, and how rows without requested logits are dropped.

Threads divide rows or columns; a row's values depend only on that row.
"""

from collections.abc import Iterator

import numpy as np

from cpu_kernels.activations import norm_row
from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.kernel import kernel
from cpu_kernels.records import Step, argument, field, scratch, stage_rows
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import add_f32, mul_f32
from cpu_kernels.simd.vectors import get_f32, get_i32, load_f32, splat_f32, store_f32


def _layer_inputs_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    projected, table, out = s.normal(3, 2 * 32), s.normal(3, 64), s.zeros(2 * 4 * 32)
    yield s.arguments(projected, 256, table, 256, out, 4 * 32 * 4, 2, 24, 32, s.normal(32), s.array([1e-3]))


class LayerInputs(Arguments):
    """Arguments of layer_inputs."""

    projected: int  # rows of layers * D floats
    projected_stride: int  # bytes from row to row
    table: int  # rows of layers * width floats
    table_stride: int  # bytes from row to row
    out: int  # rows of D floats, for each layer
    layer_bytes: int  # from one layer's rows to the next's
    layers: int  # number of layers
    width: int  # values of an input
    padded: int  # D: the width padded to whole vectors
    weight: int  # of the norm
    epsilon: int  # address of a float


_INPUTS = indices_of(LayerInputs)


@kernel(LayerInputs, _layer_inputs_samples)
def layer_inputs(op: int, step: int, thread: int, threads: int) -> None:
    """out[layer][row] = RMSNorm(projected[row][layer]) * weight + table[row][layer]."""
    layers, width = argument(op, _INPUTS.layers), argument(op, _INPUTS.width)
    padded, epsilon = argument(op, _INPUTS.padded), get_f32(argument(op, _INPUTS.epsilon))
    normal = scratch(step, thread)
    items = stage_rows(op, step) * layers
    first, last = first_share(op, step, items, thread, threads)
    while first >= 0:
        for item in range(first, last):
            row, layer = item // layers, item % layers
            source = argument(op, _INPUTS.projected) + row * argument(op, _INPUTS.projected_stride) + layer * padded * 4
            addend = argument(op, _INPUTS.table) + row * argument(op, _INPUTS.table_stride) + layer * width * 4
            out = argument(op, _INPUTS.out) + layer * argument(op, _INPUTS.layer_bytes) + row * padded * 4
            norm_row(source, argument(op, _INPUTS.weight), width, padded, epsilon, normal)
            for i in range(0, width, 16):
                store_f32(out + i * 4, add_f32(load_f32(normal + i * 4), load_f32(addend + i * 4)))
        first, last = next_share(op, step, items, thread, threads)


def _image_inputs_samples() -> Iterator[Sample]:
    for adds in (0, 1):
        s = Sample(rows=3)
        s.step({Step.IMAGE_ROWS: s.normal(3, 96), Step.IMAGE_STRIDE: 384})
        yield s.arguments(s.normal(3, 48), 192, 40, 192 * adds, s.array([0.7]), adds)


class ImageInputs(Arguments):
    """Arguments of image_inputs."""

    x: int  # rows of floats, changed in place
    stride: int  # bytes from row to row
    count: int  # values of a row
    offset: int  # bytes in a row of the image before its values
    factor: int  # address of a float, by which they are multiplied
    adds: int  # 1 if they are added to x, 0 if they replace it


_IMAGE = indices_of(ImageInputs)


@kernel(ImageInputs, _image_inputs_samples)
def image_inputs(op: int, step: int, thread: int, threads: int) -> None:
    """x = factor * image, or x += factor * image; steps without an image change nothing."""
    image = field(step, Step.IMAGE_ROWS)
    if image == 0:
        return
    vectors, factor = (argument(op, _IMAGE.count) + 15) // 16, splat_f32(get_f32(argument(op, _IMAGE.factor)))
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for row in range(stage_rows(op, step)):
            x = argument(op, _IMAGE.x) + row * argument(op, _IMAGE.stride)
            y = image + row * field(step, Step.IMAGE_STRIDE) + argument(op, _IMAGE.offset)
            for v in range(first, last):
                value = mul_f32(load_f32(y + v * 64), factor)
                if argument(op, _IMAGE.adds) != 0:
                    value = add_f32(load_f32(x + v * 64), value)
                store_f32(x + v * 64, value)
        first, last = next_share(op, step, vectors, thread, threads)


def _keep_wanted_samples() -> Iterator[Sample]:
    s = Sample(rows=2)
    s.step({Step.WANTED: s.array([1, 3], np.int32)})
    for apart in (False, True):
        rows = s.normal(2, 5, 48)
        yield s.arguments(
            rows, 48 * 4, 2, 5 * 48 * 4, s.zeros(2 * 3 * 48) if apart else rows, (3 if apart else 5) * 48 * 4
        )


class KeepWanted(Arguments):
    """Arguments of keep_wanted."""

    rows: int  # of the first plane
    row_bytes: int  # bytes of a row
    planes: int  # number of planes
    plane_bytes: int  # from one plane to the next
    out: int  # rows of the first plane to write
    out_plane_bytes: int  # from one plane to the next there


_KEPT = indices_of(KeepWanted)


@kernel(KeepWanted, _keep_wanted_samples)
def keep_wanted(op: int, step: int, thread: int, threads: int) -> None:
    """Copy the rows with requested logits of some planes to the front of other planes, or of the same ones.

    Row indices are ascending, so copying within a plane is safe.
    """
    vectors = argument(op, _KEPT.row_bytes) // 64
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for plane in range(argument(op, _KEPT.planes)):
            rows = argument(op, _KEPT.rows) + plane * argument(op, _KEPT.plane_bytes)
            out = argument(op, _KEPT.out) + plane * argument(op, _KEPT.out_plane_bytes)
            for row in range(stage_rows(op, step)):
                source = rows + get_i32(field(step, Step.WANTED) + 4 * row) * argument(op, _KEPT.row_bytes)
                for v in range(first, last):
                    store_f32(out + row * argument(op, _KEPT.row_bytes) + v * 64, load_f32(source + v * 64))
        first, last = next_share(op, step, vectors, thread, threads)
