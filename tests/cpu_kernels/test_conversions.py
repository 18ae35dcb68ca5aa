"""Types without kernels: the native form they become holds the same values."""

import numpy as np
import pytest
from kernel_harness import block_type, dequantized, random_weights

from cpu_kernels.formats.conversions import native_form


def test_conversion_loses_nothing() -> None:
    raw = random_weights("NVFP4", 8, 512)
    form = native_form("NVFP4")
    assert form.weight_format.name == "BF16"
    converted = form.convert(raw)
    assert converted.dtype == np.uint8
    np.testing.assert_array_equal(dequantized("BF16", converted), dequantized("NVFP4", raw))


def test_native_types_stay_as_they_are() -> None:
    raw = random_weights("Q5_K", 4, 256)
    form = native_form("Q5_K")
    assert form.weight_format.name == "Q5_K"
    assert form.convert(raw) is raw


@pytest.mark.parametrize("name", ["Q9_X", "I32"])
def test_unknown_types_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        native_form(name)


def test_every_type_has_a_native_form() -> None:
    for name in ("Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ4_XS", "MXFP4"):
        assert block_type(name).name == name
        native_form(name)
