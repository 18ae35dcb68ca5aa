"""The packed formats that kernels exist for, by the name of the GGUF block type they are packed from."""

from cpu_kernels.formats import floats, iq4, q2_k, q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0
from cpu_kernels.formats.weight_format import WeightFormat

WEIGHT_FORMATS: dict[str, WeightFormat] = {
    weight_format.name: weight_format
    for weight_format in (
        floats.F32_FORMAT,
        floats.F16_FORMAT,
        floats.BF16_FORMAT,
        q8_0.FORMAT,
        q4_0.FORMAT,
        q4_1.FORMAT,
        q5_0.FORMAT,
        q5_1.FORMAT,
        iq4.IQ4_NL_FORMAT,
        iq4.IQ4_XS_FORMAT,
        iq4.MXFP4_FORMAT,
        q2_k.FORMAT,
        q4_k.FORMAT,
        q5_k.FORMAT,
        q6_k.FORMAT,
    )
}
