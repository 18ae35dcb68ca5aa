"""Weights rounded to words: the rounding, exact sums, and products beside float64."""

import numpy as np
import pytest

from cpu_kernels.formats.table import WORD_FORMATS, format_named
from cpu_kernels.records import TILE_WIDTHS, Act, Form
from cpu_kernels.words import BLOCK, NORM, WORD
from tests.cpu_kernels.kernel_harness import Activations, Matrix, copied, dequantized, random_weights

ROWS, K, TOKENS = 64, 3 * BLOCK, 13
NAMES = list(WORD_FORMATS)
WIDEST = TILE_WIDTHS[-1]


def tokens() -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((TOKENS, K)).astype(np.float32)
    x[3] = 0.0
    x[5, :BLOCK] *= 1000.0
    x[6, 7] = 300.0
    x[7] *= 1e-32
    return x


def weights(name: str) -> tuple[Matrix, np.ndarray]:
    """Packed, and as the file has them."""
    raw = random_weights(name, ROWS, K)
    return Matrix.pack(WORD_FORMATS[name], raw, K, threads=2), dequantized(name, raw)


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Words [row][k] and units [row][block], in float64."""
    blocks = x.astype(np.float64).reshape(len(x), -1, BLOCK)
    norms, largest = np.linalg.norm(blocks, axis=2), np.abs(blocks).max(axis=2)
    units = np.where(largest < 1e-30, 0, np.maximum(norms / float(NORM), largest / float(WORD)))
    words = np.rint(np.divide(blocks, units[..., None], out=np.zeros_like(blocks), where=units[..., None] != 0))
    return words.reshape(x.shape), units


def errors(got: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of products x @ y.T, in units of |x| |y|."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)
    return (got - x @ y.T) / np.where(size > 0, size, 1.0)


def test_no_sum_of_a_block_overflows() -> None:
    """Rounding adds at most half a word to each number, so sqrt(BLOCK) / 2 to the norm."""
    assert (float(NORM) + np.sqrt(BLOCK) / 2) ** 2 < 2**31


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_rounded_to_the_nearest_word(name: str) -> None:
    matrix, values = weights(name)
    words, units = rounded(values)
    got = matrix.embed(list(range(ROWS)))
    unit = np.repeat(units, BLOCK, axis=1)
    assert (np.abs(got - values) <= 0.501 * unit).all()
    assert np.mean(np.rint(got / unit) == words) > 0.99  # others are halfway between two words


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (TOKENS, WIDEST), (TOKENS, 4)])
def test_activations_are_rounded_alike(rows: int, width: int) -> None:
    act, x = Activations(K), tokens()[:rows]
    act.pack(x, width, 2, int(Form.WORDS))
    words, units = rounded(x)
    got = act.values(Act.WORDS, np.int16, rows, width, K, 2)
    assert np.abs(got - words).max() <= 1
    assert np.mean(got == words) > 0.99
    np.testing.assert_allclose(act.values(Act.WORD_UNITS, np.float32, rows, width, K // BLOCK), units, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_words(name: str) -> None:
    """Of what was packed: only the additions of blocks round."""
    (matrix, _), x, act = weights(name), tokens(), Activations(K)
    act.pack(x, WIDEST, 1, int(Form.WORDS))
    words = act.values(Act.WORDS, np.int16, TOKENS, WIDEST, K, 2).astype(np.float64)
    units = act.values(Act.WORD_UNITS, np.float32, TOKENS, WIDEST, K // BLOCK)
    seen = words * np.repeat(units.astype(np.float64), BLOCK, axis=1)
    got = matrix.multiply(x, WIDEST)
    assert np.abs(errors(got, seen, matrix.embed(list(range(ROWS))))).max() < 3e-7


@pytest.mark.parametrize("name", NAMES)
def test_products_are_near_those_of_the_floats(name: str) -> None:
    (matrix, values), x = weights(name), tokens()
    found = errors(matrix.multiply(x, WIDEST), x, values)[:7]  # the next token is below what is stored
    assert found.std() < 1e-5
    assert np.abs(found).max() < 5e-5


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_sums_do_not_overflow(name: str) -> None:
    """Equal numbers are all rounded alike, by at most half a word of NORM / sqrt(BLOCK)."""
    raw = random_weights(name, 32, K)
    ones = np.ones((32, K), np.float32)
    ones[1], ones[2, ::2], ones[3, 1:] = -1.0, -1.0, 0.0
    kind = np.float16(ones) if name == "F16" else (ones.view(np.uint32) >> 16).astype(np.uint16)
    raw[:] = np.ascontiguousarray(kind).view(np.uint8).reshape(32, -1)
    matrix = Matrix.pack(WORD_FORMATS[name], raw, K)
    for width in (1, WIDEST):
        got = matrix.multiply(copied(ones[:4]).reshape(4, K), width)
        assert np.abs(errors(got, ones[:4], ones)).max() < np.sqrt(BLOCK) / NORM, width


@pytest.mark.parametrize("name", NAMES)
def test_a_result_does_not_depend_on_tile_width_or_threads(name: str) -> None:
    (matrix, _), x = weights(name), tokens()
    addend = np.random.default_rng(2).standard_normal((TOKENS, ROWS)).astype(np.float32)
    alone = matrix.multiply(x, width=1)
    for width in TILE_WIDTHS:
        for threads in (1, 2, 5):
            assert np.array_equal(matrix.multiply(x, width, threads), alone), (width, threads)
        assert np.array_equal(matrix.multiply(x, width, 2, addend), alone + addend), width


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_numbers_that_are_none_show_in_every_result(name: str, poison: float) -> None:
    """Of an activation in its token's results, of a weight in its row's, and in no other."""
    (matrix, _), x = weights(name), tokens()[:6]
    clean = matrix.multiply(x, WIDEST)
    x[4, 200] = poison
    for width in TILE_WIDTHS:
        got = matrix.multiply(x, width)
        assert not np.isfinite(got[4]).any(), width
        np.testing.assert_array_equal(np.delete(got, 4, axis=0), np.delete(clean, 4, axis=0))
    raw = random_weights(name, ROWS, K)
    values = raw.view(np.float16 if name == "F16" else np.uint16)
    values[9, 200] = poison if name == "F16" else (0x7FC0 if np.isnan(poison) else 0x7F80)
    got = Matrix.pack(WORD_FORMATS[name], raw, K).multiply(tokens()[:3], WIDEST)
    assert not np.isfinite(got[:, 9]).any()
    np.testing.assert_array_equal(np.delete(got, 9, axis=1), np.delete(clean[:3], 9, axis=1))


def test_every_kernel_is_found_by_its_name_and_checked_before_it_is_used() -> None:
    for weight_format in WORD_FORMATS.values():
        assert format_named(weight_format.name) is weight_format
        for kernel in (weight_format.repack, weight_format.embed, *weight_format.matmul.values()):
            assert kernel.samples is not None
            assert sum(1 for _ in kernel.samples()) > 0
