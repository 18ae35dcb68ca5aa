"""Parallel residual streams (AltUp, Baykal et al., 2023): layers compute with the first, and the others are predicted.

A row's router scores, computed from its normalised values, determine how streams are mixed. Streams are stored as
[stream][row][k]. Threads divide rows; with a single row each thread computes the scores and a part of the columns.
"""

import math
from collections.abc import Iterator

import numpy as np

from cpu_kernels.activations import norm_row
from cpu_kernels.declarations import inner
from cpu_kernels.kernel import kernel
from cpu_kernels.records import argument, scratch, share, stage_rows
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import add_f32, fma, max_f32, mul_f32, select_first, sub_f32, sum_f32
from cpu_kernels.simd.vectors import get_f32, load_f32, put_f32, splat_f32, store_f32, zero_f32

_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_LEAST = np.float32(1e-5)
"""Lower bound of a stream's mean square when it is scaled to another stream's."""


@inner
def _mean_square(x: int, k: int) -> np.float32:
    """Mean of x^2 over a row whose padding is zero."""
    squares = zero_f32()
    for i in range(0, k, 16):
        squares = fma(load_f32(x + i * 4), load_f32(x + i * 4), squares)
    return np.float32(sum_f32(squares) / np.float32(k))


@inner
def _scores(x: int, router: int, streams: int, k: int, epsilon: np.float32, out: int) -> None:
    """out = tanh(router * normalised row). router: one row per stream, multiplied by the norm's weights."""
    row_bytes = (k + 15) // 16 * 64
    factor = np.float32(_ONE / np.float32(math.sqrt(_mean_square(x, k) + epsilon)))
    for m in range(streams):
        total = zero_f32()
        for i in range(0, k, 16):
            total = fma(load_f32(x + i * 4), load_f32(router + m * row_bytes + i * 4), total)
        score = np.float32(sum_f32(total) * factor)
        put_f32(out + 4 * m, _ONE - _TWO / (_ONE + np.float32(math.exp(_TWO * score))))


@inner
def _mix(matrix: int, row: int, scores: int, streams: int) -> np.float32:
    """The dot product of a row of a matrix, [row][stream], and the scores."""
    total = _ZERO
    for m in range(streams):
        total += get_f32(matrix + 4 * (row * streams + m)) * get_f32(scores + 4 * m)
    return total


@inner
def _rows_and_columns(rows: int, k: int, first: int, last: int, threads: int) -> tuple[int, int, int, int]:
    """Rows, and vectors of each, of items first..last-1: rows, or equal parts of a single row, one for each thread."""
    vectors = (k + 15) // 16
    if rows == 1:
        return 0, 1, share(vectors, first, threads), share(vectors, last, threads)
    return first, last, 0, vectors


def _predict_samples() -> Iterator[Sample]:
    for rows in (1, 3):
        s = Sample(rows=rows)
        shape = (3 * 128, 128, 3, 32)
        matrices = (s.normal(3, 32), s.normal(9, 3))
        yield s.arguments(
            s.normal(3, 3, 32), *shape, *matrices, s.zeros(3 * 3 * 32), s.zeros(3 * 32), 128, s.array([1e-3])
        )


@kernel(_predict_samples)
def predict(op: int, step: int, thread: int, threads: int) -> None:
    """predictions[j] = streams[j] + the sum over i of coefficient[j][i] * streams[i]; x = predictions[0].

    Arguments: 0 streams, 1 bytes from one stream to the next, 2 bytes of a row, 3 number of streams, 4 k, 5 router,
    6 matrix of coefficients [j][i][score], 7 predictions, in the streams' layout, 8 x, 9 its stride, 10 address of
    epsilon.
    """
    plane, stride, streams, k = argument(op, 1), argument(op, 2), argument(op, 3), argument(op, 4)
    scores, epsilon = scratch(step, thread), get_f32(argument(op, 10))
    rows = stage_rows(op, step)
    items = threads if rows == 1 else rows
    first, last = first_share(op, step, items, thread, threads)
    while first >= 0:
        top, bottom, begin, end = _rows_and_columns(rows, k, first, last, threads)
        for row in range(top, bottom):
            source, out = argument(op, 0) + row * stride, argument(op, 7) + row * stride
            x = argument(op, 8) + row * argument(op, 9)
            _scores(source, argument(op, 5), streams, k, epsilon, scores)
            for j in range(streams):
                for v in range(begin, end):
                    total = load_f32(source + j * plane + v * 64)
                    store_f32(out + j * plane + v * 64, total)
                for i in range(streams):
                    coefficient = splat_f32(_mix(argument(op, 6), j * streams + i, scores, streams))
                    for v in range(begin, end):
                        total = load_f32(out + j * plane + v * 64)
                        store_f32(
                            out + j * plane + v * 64, fma(load_f32(source + i * plane + v * 64), coefficient, total)
                        )
            for v in range(begin, end):
                store_f32(x + v * 64, load_f32(out + v * 64))
        first, last = next_share(op, step, items, thread, threads)


def _correct_samples() -> Iterator[Sample]:
    for rows in (1, 3):
        s = Sample(rows=rows)
        shape = (3 * 128, 128, 3, 32)
        matrices, out = (s.normal(3, 32), s.normal(3, 3)), (s.zeros(3 * 3 * 32), s.zeros(3 * 32), 128)
        yield s.arguments(
            s.normal(3, 32), 128, s.normal(3, 3, 32), *shape, *matrices, *out, s.normal(32), s.array([1e-3])
        )


@kernel(_correct_samples)
def correct(op: int, step: int, thread: int, threads: int) -> None:
    """streams[j] = predictions[j] + (1 + coefficient[j]) * (x - predictions[0]); gated = streams[0] * weight.

    Arguments: 0 x, the layer's output for the first prediction, 1 its stride, 2 predictions, 3 bytes from one stream to
    the next, 4 bytes of a row, 5 number of streams, 6 k, 7 router, 8 matrix of coefficients [j][score], 9 streams, 10
    gated, 11 its stride, 12 weight, 13 address of epsilon.
    """
    plane, stride, streams, k = argument(op, 3), argument(op, 4), argument(op, 5), argument(op, 6)
    scores, epsilon = scratch(step, thread), get_f32(argument(op, 13))
    rows = stage_rows(op, step)
    items = threads if rows == 1 else rows
    first, last = first_share(op, step, items, thread, threads)
    while first >= 0:
        top, bottom, begin, end = _rows_and_columns(rows, k, first, last, threads)
        for row in range(top, bottom):
            x, source = argument(op, 0) + row * argument(op, 1), argument(op, 2) + row * stride
            out, gated = argument(op, 9) + row * stride, argument(op, 10) + row * argument(op, 11)
            _scores(x, argument(op, 7), streams, k, epsilon, scores)
            for j in range(streams):
                coefficient = splat_f32(_ONE + _mix(argument(op, 8), j, scores, streams))
                for v in range(begin, end):
                    found = sub_f32(load_f32(x + v * 64), load_f32(source + v * 64))
                    store_f32(out + j * plane + v * 64, fma(found, coefficient, load_f32(source + j * plane + v * 64)))
            for v in range(begin, end):
                store_f32(gated + v * 64, mul_f32(load_f32(out + v * 64), load_f32(argument(op, 12) + v * 64)))
        first, last = next_share(op, step, items, thread, threads)


def _add_to_others_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.normal(3, 3, 32), 3 * 128, 128, 3, 32, s.normal(3, 32), 128, s.normal(32), s.array([1e-3]))


@kernel(_add_to_others_samples)
def add_to_others(op: int, step: int, thread: int, threads: int) -> None:
    """streams[j] += RMSNorm(y) * weight for all but the first.

    Arguments: 0 streams, 1 bytes from one to the next, 2 bytes of a row, 3 number of streams, 4 k, 5 y, 6 its stride,
    7 weight, 8 address of epsilon.
    """
    rows, k, normal = stage_rows(op, step), argument(op, 4), scratch(step, thread)
    padded = (k + 15) // 16 * 16
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            norm_row(
                argument(op, 5) + row * argument(op, 6), argument(op, 7), k, padded, get_f32(argument(op, 8)), normal
            )
            for j in range(1, argument(op, 3)):
                out = argument(op, 0) + j * argument(op, 1) + row * argument(op, 2)
                for i in range(0, padded, 16):
                    store_f32(out + i * 4, add_f32(load_f32(out + i * 4), load_f32(normal + i * 4)))
        first, last = next_share(op, step, rows, thread, threads)


def _spread_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.normal(3, 32), 128, s.normal(3, 3, 32), 3 * 128, 128, 3, 32)


@kernel(_spread_samples)
def spread(op: int, step: int, thread: int, threads: int) -> None:
    """streams[0] = x, and the other streams are scaled to x's root mean square.

    Arguments: 0 x, 1 its stride, 2 streams, 3 bytes from one to the next, 4 bytes of a row, 5 number of streams, 6 k.
    """
    rows, k = stage_rows(op, step), argument(op, 6)
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            x, out = argument(op, 0) + row * argument(op, 1), argument(op, 2) + row * argument(op, 4)
            size = _mean_square(x, k)
            for i in range(0, k, 16):
                store_f32(out + i * 4, load_f32(x + i * 4))
            for j in range(1, argument(op, 5)):
                stream = out + j * argument(op, 3)
                factor = splat_f32(np.float32(math.sqrt(size / max(_LEAST, _mean_square(stream, k)))))
                for i in range(0, k, 16):
                    store_f32(stream + i * 4, mul_f32(load_f32(stream + i * 4), factor))
        first, last = next_share(op, step, rows, thread, threads)


def _merge_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.zeros(3 * 32), 128, s.normal(3, 32), s.normal(3, 3, 32), 3 * 128, 128, 3, 32)


@kernel(_merge_samples)
def merge(op: int, step: int, thread: int, threads: int) -> None:
    """x = the mean of the first stream and of the others, scaled to the first one's root mean square.

    Arguments: 0 x, 1 its stride, 2 the first stream, 3 the other streams, as an array whose first stream is ignored,
    4 bytes from one to the next, 5 bytes of a row, 6 number of streams, 7 k.
    """
    rows, streams, k = stage_rows(op, step), argument(op, 6), argument(op, 7)
    share_of_one = splat_f32(np.float32(_ONE / np.float32(streams)))
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            x, stream_of_first = argument(op, 0) + row * argument(op, 1), argument(op, 2) + row * argument(op, 5)
            others = argument(op, 3) + row * argument(op, 5)
            size = _mean_square(stream_of_first, k)
            for i in range(0, k, 16):
                store_f32(x + i * 4, load_f32(stream_of_first + i * 4))
            for j in range(1, streams):
                stream = others + j * argument(op, 4)
                factor = splat_f32(np.float32(math.sqrt(size / max(_LEAST, _mean_square(stream, k)))))
                for i in range(0, k, 16):
                    store_f32(x + i * 4, fma(load_f32(stream + i * 4), factor, load_f32(x + i * 4)))
            for i in range(0, k, 16):
                store_f32(x + i * 4, mul_f32(load_f32(x + i * 4), share_of_one))
        first, last = next_share(op, step, rows, thread, threads)


def _keep_largest_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.normal(3, 64), 256, 40, s.array([0.5]))


@kernel(_keep_largest_samples)
def keep_largest(op: int, step: int, thread: int, threads: int) -> None:
    """x = max(0, x - (mean + deviations * standard deviation)), by row.

    Arguments: 0 x, 1 stride, 2 values of a row, 3 address of the number of deviations.
    """
    rows, k = stage_rows(op, step), argument(op, 2)
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            x = argument(op, 0) + row * argument(op, 1)
            total = zero_f32()
            for i in range(0, k, 16):
                total = add_f32(total, select_first(load_f32(x + i * 4), zero_f32(), k - i))
            mean = np.float32(sum_f32(total) / np.float32(k))
            squares = zero_f32()
            for i in range(0, k, 16):
                v = select_first(sub_f32(load_f32(x + i * 4), splat_f32(mean)), zero_f32(), k - i)
                squares = fma(v, v, squares)
            deviation = np.float32(math.sqrt(sum_f32(squares) / np.float32(k - 1)))
            least = splat_f32(np.float32(mean + deviation * get_f32(argument(op, 3))))
            for i in range(0, k, 16):
                store_f32(x + i * 4, max_f32(zero_f32(), sub_f32(load_f32(x + i * 4), least)))
        first, last = next_share(op, step, rows, thread, threads)
