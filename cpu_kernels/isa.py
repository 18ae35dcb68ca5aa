"""Which instruction set the kernels are compiled for, chosen once at import from the host's features."""

import os
from enum import StrEnum

from llvmlite import binding

ISA_VARIABLE = "LOCALLLM_ISA"


class Isa(StrEnum):
    """Ways to multiply bytes and add the products in fours, best first."""

    AVX512_VNNI = "avx512-vnni"
    AVX_VNNI = "avx-vnni"
    AVX512 = "avx512"
    AVX2 = "avx2"
    NEON_DOT = "neon-dot"
    PORTABLE = "portable"


REQUIRED_FEATURES: dict[Isa, frozenset[str]] = {
    Isa.AVX512_VNNI: frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
    Isa.AVX_VNNI: frozenset({"avx2", "fma", "f16c", "avxvnni"}),
    Isa.AVX512: frozenset({"avx512f", "avx512bw", "avx512vl"}),
    Isa.AVX2: frozenset({"avx2", "fma", "f16c"}),
    Isa.NEON_DOT: frozenset({"neon", "dotprod"}),
    Isa.PORTABLE: frozenset(),
}


def target_features() -> frozenset[str]:
    """Features that LLVM may use: those of NUMBA_CPU_FEATURES where it is set, else the host's."""
    override = os.environ.get("NUMBA_CPU_FEATURES")
    if override is not None:
        return frozenset(item[1:] for item in override.split(",") if item.startswith("+"))
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


def choose_isa(features: frozenset[str], forced: str | None = None) -> Isa:
    """Return the forced instruction set, or the first whose features are all present.

    Raises ValueError if the forced name is unknown or the processor lacks its features.
    """
    if forced:
        names = [isa.value for isa in Isa]
        if forced not in names:
            raise ValueError(f"{ISA_VARIABLE}={forced}: unknown; choose one of {', '.join(names)}")
        missing = REQUIRED_FEATURES[Isa(forced)] - features
        if missing:
            raise ValueError(f"{ISA_VARIABLE}={forced}: this processor lacks {', '.join(sorted(missing))}")
        return Isa(forced)
    return next(isa for isa in Isa if features >= REQUIRED_FEATURES[isa])


ISA = choose_isa(target_features(), os.environ.get(ISA_VARIABLE))
