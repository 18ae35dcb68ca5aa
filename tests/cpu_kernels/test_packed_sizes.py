"""Bytes of packed weights compared with the file's."""

import numpy as np
import pytest
from kernel_harness import Matrix, dequantized, random_weights, sizes

from cpu_kernels.formats.table import WEIGHT_FORMATS

LOW_BITS = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0"),
    *("Q1_0", "Q2_0", "NVFP4"),
)


@pytest.mark.parametrize("name", LOW_BITS)
def test_low_bits_are_packed_at_the_size_of_the_file(name: str) -> None:
    weight_format, (items, size) = WEIGHT_FORMATS[name], sizes(name)
    k = 1024
    assert weight_format.group_bytes(k) / weight_format.group_rows <= 1.1 * k / items * size


def test_every_scale_of_nvfp4_is_read_as_ggml_does() -> None:
    """Includes subnormal exponents, unused sign bits, and the two NaN codes."""
    k, rows = 512, 32
    raw = random_weights("NVFP4", rows, k).reshape(rows * k // 64, 36)
    raw[:64, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    raw = raw.reshape(rows, -1)
    matrix = Matrix.pack(WEIGHT_FORMATS["NVFP4"], raw, k)
    np.testing.assert_array_equal(matrix.embed(list(range(rows))), dequantized("NVFP4", raw))
