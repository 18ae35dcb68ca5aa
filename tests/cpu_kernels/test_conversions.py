"""Block types and the formats that compute them."""

import pytest
from kernel_harness import block_type, random_weights

from cpu_kernels.formats.conversions import native_form


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
    for name in ("Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ4_XS", "MXFP4", "NVFP4"):
        assert block_type(name).name == name
        native_form(name)
