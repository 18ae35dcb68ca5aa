"""Parallel residual streams (AltUp, Baykal et al., 2023): layers compute with the first, and the others are predicted.

A row's router scores, computed from its normalised values, determine how streams are mixed. Streams are stored as
[stream][row][k]. Threads divide rows; with a single row each thread computes the scores and a part of the columns.
"""

import math
from collections.abc import Iterator

import numpy as np

from cpu_kernels.activations import norm_row
from cpu_kernels.arguments import Arguments, indices_of
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


class Predict(Arguments):
    """Arguments of predict."""

    streams: int  # rows of floats of each stream
    stream_bytes: int  # from one stream to the next
    row_bytes: int  # bytes of a row
    count: int  # number of streams
    k: int  # values of a row
    router: int  # rows of weights, one per stream
    coefficients: int  # matrix [j][i][score]
    predictions: int  # in the layout of streams
    x: int  # rows of the first prediction
    x_stride: int  # bytes from row to row
    epsilon: int  # address of a float


_PREDICT = indices_of(Predict)


@kernel(Predict, _predict_samples)
def predict(op: int, step: int, thread: int, threads: int) -> None:
    """predictions[j] = streams[j] + the sum over i of coefficient[j][i] * streams[i]; x = predictions[0]."""
    plane, stride = argument(op, _PREDICT.stream_bytes), argument(op, _PREDICT.row_bytes)
    streams, k = argument(op, _PREDICT.count), argument(op, _PREDICT.k)
    scores, epsilon = scratch(step, thread), get_f32(argument(op, _PREDICT.epsilon))
    rows = stage_rows(op, step)
    items = threads if rows == 1 else rows
    first, last = first_share(op, step, items, thread, threads)
    while first >= 0:
        top, bottom, begin, end = _rows_and_columns(rows, k, first, last, threads)
        for row in range(top, bottom):
            source = argument(op, _PREDICT.streams) + row * stride
            out = argument(op, _PREDICT.predictions) + row * stride
            x = argument(op, _PREDICT.x) + row * argument(op, _PREDICT.x_stride)
            _scores(source, argument(op, _PREDICT.router), streams, k, epsilon, scores)
            for j in range(streams):
                for v in range(begin, end):
                    total = load_f32(source + j * plane + v * 64)
                    store_f32(out + j * plane + v * 64, total)
                for i in range(streams):
                    coefficient = splat_f32(_mix(argument(op, _PREDICT.coefficients), j * streams + i, scores, streams))
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


class Correct(Arguments):
    """Arguments of correct."""

    x: int  # rows of the layer's output for the first prediction
    x_stride: int  # bytes from row to row
    predictions: int  # rows of floats of each stream
    stream_bytes: int  # from one stream to the next
    row_bytes: int  # bytes of a row
    count: int  # number of streams
    k: int  # values of a row
    router: int  # rows of weights, one per stream
    coefficients: int  # matrix [j][score]
    streams: int  # in the layout of predictions
    gated: int  # rows of floats
    gated_stride: int  # bytes from row to row
    weight: int  # of the gated rows
    epsilon: int  # address of a float


_CORRECT = indices_of(Correct)


@kernel(Correct, _correct_samples)
def correct(op: int, step: int, thread: int, threads: int) -> None:
    """streams[j] = predictions[j] + (1 + coefficient[j]) * (x - predictions[0]); gated = streams[0] * weight."""
    plane, stride = argument(op, _CORRECT.stream_bytes), argument(op, _CORRECT.row_bytes)
    streams, k = argument(op, _CORRECT.count), argument(op, _CORRECT.k)
    scores, epsilon = scratch(step, thread), get_f32(argument(op, _CORRECT.epsilon))
    rows = stage_rows(op, step)
    items = threads if rows == 1 else rows
    first, last = first_share(op, step, items, thread, threads)
    while first >= 0:
        top, bottom, begin, end = _rows_and_columns(rows, k, first, last, threads)
        for row in range(top, bottom):
            x = argument(op, _CORRECT.x) + row * argument(op, _CORRECT.x_stride)
            source = argument(op, _CORRECT.predictions) + row * stride
            out = argument(op, _CORRECT.streams) + row * stride
            gated = argument(op, _CORRECT.gated) + row * argument(op, _CORRECT.gated_stride)
            _scores(x, argument(op, _CORRECT.router), streams, k, epsilon, scores)
            for j in range(streams):
                coefficient = splat_f32(_ONE + _mix(argument(op, _CORRECT.coefficients), j, scores, streams))
                for v in range(begin, end):
                    found = sub_f32(load_f32(x + v * 64), load_f32(source + v * 64))
                    store_f32(out + j * plane + v * 64, fma(found, coefficient, load_f32(source + j * plane + v * 64)))
            for v in range(begin, end):
                store_f32(
                    gated + v * 64, mul_f32(load_f32(out + v * 64), load_f32(argument(op, _CORRECT.weight) + v * 64))
                )
        first, last = next_share(op, step, items, thread, threads)


def _add_to_others_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.normal(3, 3, 32), 3 * 128, 128, 3, 32, s.normal(3, 32), 128, s.normal(32), s.array([1e-3]))


class AddToOthers(Arguments):
    """Arguments of add_to_others."""

    streams: int  # rows of floats of each stream
    stream_bytes: int  # from one stream to the next
    row_bytes: int  # bytes of a row
    count: int  # number of streams
    k: int  # values of a row
    y: int  # rows of floats
    y_stride: int  # bytes from row to row
    weight: int  # of the norm
    epsilon: int  # address of a float


_OTHERS = indices_of(AddToOthers)


@kernel(AddToOthers, _add_to_others_samples)
def add_to_others(op: int, step: int, thread: int, threads: int) -> None:
    """streams[j] += RMSNorm(y) * weight for all but the first."""
    rows, k, normal = stage_rows(op, step), argument(op, _OTHERS.k), scratch(step, thread)
    padded = (k + 15) // 16 * 16
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            norm_row(
                argument(op, _OTHERS.y) + row * argument(op, _OTHERS.y_stride),
                argument(op, _OTHERS.weight),
                k,
                padded,
                get_f32(argument(op, _OTHERS.epsilon)),
                normal,
            )
            for j in range(1, argument(op, _OTHERS.count)):
                out = (
                    argument(op, _OTHERS.streams)
                    + j * argument(op, _OTHERS.stream_bytes)
                    + row * argument(op, _OTHERS.row_bytes)
                )
                for i in range(0, padded, 16):
                    store_f32(out + i * 4, add_f32(load_f32(out + i * 4), load_f32(normal + i * 4)))
        first, last = next_share(op, step, rows, thread, threads)


def _spread_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.normal(3, 32), 128, s.normal(3, 3, 32), 3 * 128, 128, 3, 32)


class Spread(Arguments):
    """Arguments of spread."""

    x: int  # rows of floats
    x_stride: int  # bytes from row to row
    streams: int  # rows of floats of each stream
    stream_bytes: int  # from one stream to the next
    row_bytes: int  # bytes of a row
    count: int  # number of streams
    k: int  # values of a row


_SPREAD = indices_of(Spread)


@kernel(Spread, _spread_samples)
def spread(op: int, step: int, thread: int, threads: int) -> None:
    """streams[0] = x, and the other streams are scaled to x's root mean square."""
    rows, k = stage_rows(op, step), argument(op, _SPREAD.k)
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            x = argument(op, _SPREAD.x) + row * argument(op, _SPREAD.x_stride)
            out = argument(op, _SPREAD.streams) + row * argument(op, _SPREAD.row_bytes)
            size = _mean_square(x, k)
            for i in range(0, k, 16):
                store_f32(out + i * 4, load_f32(x + i * 4))
            for j in range(1, argument(op, _SPREAD.count)):
                stream = out + j * argument(op, _SPREAD.stream_bytes)
                factor = splat_f32(np.float32(math.sqrt(size / max(_LEAST, _mean_square(stream, k)))))
                for i in range(0, k, 16):
                    store_f32(stream + i * 4, mul_f32(load_f32(stream + i * 4), factor))
        first, last = next_share(op, step, rows, thread, threads)


def _merge_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.zeros(3 * 32), 128, s.normal(3, 32), s.normal(3, 3, 32), 3 * 128, 128, 3, 32)


class Merge(Arguments):
    """Arguments of merge."""

    x: int  # rows of floats
    x_stride: int  # bytes from row to row
    first: int  # rows of the first stream
    others: int  # rows of each stream, of which the first is ignored
    stream_bytes: int  # from one stream to the next
    row_bytes: int  # bytes of a row
    count: int  # number of streams
    k: int  # values of a row


_MERGE = indices_of(Merge)


@kernel(Merge, _merge_samples)
def merge(op: int, step: int, thread: int, threads: int) -> None:
    """x = the mean of the first stream and of the others, scaled to the first one's root mean square."""
    rows, streams, k = stage_rows(op, step), argument(op, _MERGE.count), argument(op, _MERGE.k)
    share_of_one = splat_f32(np.float32(_ONE / np.float32(streams)))
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            x = argument(op, _MERGE.x) + row * argument(op, _MERGE.x_stride)
            stream_of_first = argument(op, _MERGE.first) + row * argument(op, _MERGE.row_bytes)
            others = argument(op, _MERGE.others) + row * argument(op, _MERGE.row_bytes)
            size = _mean_square(stream_of_first, k)
            for i in range(0, k, 16):
                store_f32(x + i * 4, load_f32(stream_of_first + i * 4))
            for j in range(1, streams):
                stream = others + j * argument(op, _MERGE.stream_bytes)
                factor = splat_f32(np.float32(math.sqrt(size / max(_LEAST, _mean_square(stream, k)))))
                for i in range(0, k, 16):
                    store_f32(x + i * 4, fma(load_f32(stream + i * 4), factor, load_f32(x + i * 4)))
            for i in range(0, k, 16):
                store_f32(x + i * 4, mul_f32(load_f32(x + i * 4), share_of_one))
        first, last = next_share(op, step, rows, thread, threads)


def _keep_largest_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    yield s.arguments(s.normal(3, 64), 256, 40, s.array([0.5]))


class KeepLargest(Arguments):
    """Arguments of keep_largest."""

    x: int  # rows of floats, changed in place
    stride: int  # bytes from row to row
    count: int  # values of a row
    deviations: int  # address of a float: how many standard deviations to subtract


_LARGEST = indices_of(KeepLargest)


@kernel(KeepLargest, _keep_largest_samples)
def keep_largest(op: int, step: int, thread: int, threads: int) -> None:
    """x = max(0, x - (mean + deviations * standard deviation)), by row."""
    rows, k = stage_rows(op, step), argument(op, _LARGEST.count)
    first, last = first_share(op, step, rows, thread, threads)
    while first >= 0:
        for row in range(first, last):
            x = argument(op, _LARGEST.x) + row * argument(op, _LARGEST.stride)
            total = zero_f32()
            for i in range(0, k, 16):
                total = add_f32(total, select_first(load_f32(x + i * 4), zero_f32(), k - i))
            mean = np.float32(sum_f32(total) / np.float32(k))
            squares = zero_f32()
            for i in range(0, k, 16):
                v = select_first(sub_f32(load_f32(x + i * 4), splat_f32(mean)), zero_f32(), k - i)
                squares = fma(v, v, squares)
            deviation = np.float32(math.sqrt(sum_f32(squares) / np.float32(k - 1)))
            least = splat_f32(np.float32(mean + deviation * get_f32(argument(op, _LARGEST.deviations))))
            for i in range(0, k, 16):
                store_f32(x + i * 4, max_f32(zero_f32(), sub_f32(load_f32(x + i * 4), least)))
        first, last = next_share(op, step, rows, thread, threads)
