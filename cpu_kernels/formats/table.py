"""The packed formats that kernels exist for, by the name of the GGUF block type they are packed from."""

from cpu_kernels.formats import floats, q4_k, q6_k, q8_0
from cpu_kernels.formats.weight_format import WeightFormat

WEIGHT_FORMATS: dict[str, WeightFormat] = {
    weight_format.name: weight_format
    for weight_format in (
        floats.F32_FORMAT,
        floats.F16_FORMAT,
        floats.BF16_FORMAT,
        q8_0.FORMAT,
        q4_k.FORMAT,
        q6_k.FORMAT,
    )
}
