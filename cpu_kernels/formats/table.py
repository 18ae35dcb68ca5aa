"""The packed formats by the name of the GGUF block type.

Each is declared in a module of its family: the layout of its blocks in a file (cpu_kernels.formats.source), the
arrangement of its values in vectors (cpu_kernels.formats.codec), and its factors; the kernels follow from that. Layouts
and tables are ggml's (ggml-common.h).
"""

from collections.abc import Iterator, Mapping
from importlib import import_module

from cpu_kernels.formats.weight_format import WeightFormat


class _Formats(Mapping[str, WeightFormat]):
    """Formats by name. A family is imported when one of its formats is first used: a model has only a few."""

    def __init__(self, **families: str) -> None:
        """families: the formats' names, by module."""
        self._modules = {name: module for module, names in families.items() for name in names.split()}

    def __getitem__(self, name: str) -> WeightFormat:
        module = import_module(f"cpu_kernels.formats.{self._modules[name]}")
        found: WeightFormat = module.FORMATS[name]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


WEIGHT_FORMATS = _Formats(
    floats="F32 F16 BF16",
    blocks_32="Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 IQ4_NL IQ4_XS MXFP4",
    scaled_blocks="NVFP4 Q1_0 Q2_0",
    k_quants="Q2_K Q3_K Q4_K Q5_K Q6_K",
    transposed="IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M TQ1_0 TQ2_0",
)
WORD_FORMATS = _Formats(words="F16 BF16")
"""Formats that round weights to words, by the name of the GGUF type that they are packed from."""


def format_named(name: str) -> WeightFormat:
    """The format of this name. Raises KeyError for another name."""
    source = name.removesuffix("_WORDS")
    return WEIGHT_FORMATS[name] if source == name else WORD_FORMATS[source]
