"""Every packed format against gguf's dequantisation and float64 products."""

import numpy as np
import pytest
from kernel_harness import (
    Matrix,
    address,
    as_multiplied,
    dequantized,
    extreme_weights,
    operation,
    random_weights,
    record,
    run_on_threads,
)

from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.records import TILE_WIDTHS, Step

ROWS, K, TOKENS = 96, 512, 13
NAMES = list(WEIGHT_FORMATS)


def matrix_of(name: str, threads: int = 1) -> Matrix:
    return Matrix.pack(WEIGHT_FORMATS[name], random_weights(name, ROWS, K), K, threads)


def tokens(seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, K)).astype(np.float32)
    x[3] = 0.0
    x[5, :256] *= 1000.0
    return x


def relative_error(got: np.ndarray, weights: np.ndarray, x: np.ndarray) -> float:
    """The largest error, in units of |row of weights| * |token|."""
    weights, x = weights.astype(np.float64), x.astype(np.float64)
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weights, axis=1)[None]
    return float(np.max(np.abs(got - x @ weights.T) / np.where(size > 0, size, 1.0)))


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_hold_the_exact_values(name: str) -> None:
    matrix = matrix_of(name, threads=2)
    ids = [0, ROWS - 1, 17, 32, 33, 5]
    expected = dequantized(name, random_weights(name, ROWS, K))[ids]
    np.testing.assert_array_equal(matrix.embed(ids), expected)
    np.testing.assert_array_equal(matrix.embed(ids, factor=3.0), expected * np.float32(3.0))


@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_quantised_activations(name: str) -> None:
    matrix, x = matrix_of(name), tokens()
    weights = dequantized(name, random_weights(name, ROWS, K))
    got = matrix.multiply(x, width=TILE_WIDTHS[-1])
    assert relative_error(got, weights, as_multiplied(x, matrix.weight_format.form)) < 2e-6
    assert relative_error(got, weights, x) < 2e-2


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_sums_are_exact(name: str) -> None:
    """Rows with all bits clear and all bits set, with the largest activations: no intermediate sum overflows."""
    raw = extreme_weights(name, 32, K)
    x = np.ones((4, K), np.float32)
    x[1], x[2, ::2], x[3, 2::4] = -1.0, -1.0, -1.0
    matrix, weights = Matrix.pack(WEIGHT_FORMATS[name], raw, K), dequantized(name, raw)
    for width in (1, TILE_WIDTHS[-1]):
        assert relative_error(matrix.multiply(x, width=width), weights, x) < 2e-6, width


@pytest.mark.parametrize("name", NAMES)
def test_a_result_does_not_depend_on_tile_width_or_threads(name: str) -> None:
    matrix, x = matrix_of(name), tokens()
    addend = np.random.default_rng(2).standard_normal((TOKENS, ROWS)).astype(np.float32)
    alone = matrix.multiply(x, width=1)
    for width in TILE_WIDTHS:
        for threads in (1, 2, 5):
            assert np.array_equal(matrix.multiply(x, width, threads), alone), (width, threads)
        assert np.array_equal(matrix.multiply(x, width, 2, addend), alone + addend), width


@pytest.mark.parametrize("name", NAMES)
def test_a_few_tiles_that_take_turns_give_what_each_token_alone_gives(name: str) -> None:
    matrix, x = matrix_of(name), tokens()
    alone = matrix.multiply(x, width=1)
    for rows in (TILE_WIDTHS[-1] + 1, 2 * TILE_WIDTHS[-1] + 1):
        assert np.array_equal(matrix.multiply(x[:rows], TILE_WIDTHS[-1], 2), alone[:rows]), rows


def test_rounds_of_tokens_that_fill_the_cache_give_what_each_token_alone_gives() -> None:
    k = 32768
    matrix = Matrix.pack(WEIGHT_FORMATS["Q4_K"], random_weights("Q4_K", 32, k), k)
    x = np.random.default_rng(4).standard_normal((TOKENS, k)).astype(np.float32)
    assert np.array_equal(matrix.multiply(x, TILE_WIDTHS[-1], 2), matrix.multiply(x, width=1))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K"])
def test_rows_mapped_to_nothing_are_zero(name: str) -> None:
    weight_format = WEIGHT_FORMATS[name]
    raw = random_weights(name, ROWS, K)
    matrix = Matrix.pack(weight_format, raw, K)
    row_map = np.full(ROWS, -1, dtype=np.int32)
    row_map[::2] = np.arange(ROWS // 2)[::-1]
    arguments = (address(raw), raw.shape[1], address(matrix.packed), weight_format.group_bytes(K))
    groups = ROWS // weight_format.group_rows
    op = operation(*arguments, weight_format.group_rows, K, address(row_map), groups)
    run_on_threads(weight_format.repack, op, record(Step.SIZE, {}), 1)
    expected = np.zeros((ROWS, K), np.float32)
    expected[::2] = dequantized(name, raw)[: ROWS // 2][::-1]
    np.testing.assert_array_equal(matrix.embed(list(range(ROWS))), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_activations_that_are_not_numbers_show_in_every_result(name: str, poison: float) -> None:
    """And in no other token's result."""
    matrix, x = matrix_of(name), tokens()[:6]
    clean = matrix.multiply(x, TILE_WIDTHS[-1])
    x[4, 200] = poison
    for width in TILE_WIDTHS:
        got = matrix.multiply(x, width)
        assert not np.isfinite(got[4]).any(), width
        np.testing.assert_array_equal(np.delete(got, 4, axis=0), np.delete(clean, 4, axis=0))


def test_every_kernel_of_a_format_is_checked_before_it_is_used() -> None:
    for weight_format in WEIGHT_FORMATS.values():
        for kernel in (weight_format.repack, weight_format.embed, *weight_format.matmul.values()):
            assert kernel.samples is not None
            assert sum(1 for _ in kernel.samples()) > 0
