"""Instruction sets: which one this processor has, and how kernels adapt to each.

`POLICY` is the only description of processor differences that kernels read. Its choices come from measurement; see
docs/speed.md. `TARGET` is the code generator's target.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

from llvmlite import binding

from cpu_kernels import UnusableIsaError
from cpu_kernels.system_facts import arm_features, is_arm

ISA_VARIABLE = "LOCALLLM_ISA"
_TRIPLE = binding.get_process_triple()
IS_ARM64 = is_arm(_TRIPLE)
"""Whether this process runs on 64-bit ARM."""


class Isa(StrEnum):
    """Instruction sets for dot products of four bytes, best first."""

    AVX512_VNNI = "avx512-vnni"
    AVX_VNNI = "avx-vnni"
    AVX512 = "avx512"
    AVX2 = "avx2"
    NEON_DOT = "neon-dot"
    PORTABLE = "portable"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How kernels are written for an instruction set."""

    # Features that a processor must have, by LLVM's names.
    requires: frozenset[str]
    # cpu, extras: LLVM's name of a baseline processor with the set, and the features of the set that it lacks; the
    # target if the set is forced.
    cpu: str
    extras: str = ""
    # LLVM's name of the processor whose timing it assumes, "" for the target's own. It brings no features.
    tuned_for: str = ""
    # Features that tell LLVM what is fast. Without fast-dpwssd it splits vpdpwssd in two for Intel's processors.
    tuning: str = ""
    # Registers that a vector of sixteen 32-bit lanes takes.
    vector_parts: int
    # Tokens that one register tile may hold, at most five widths: a tile, the weights and their operands have to fit
    # into the registers.
    tile_widths: tuple[int, ...]
    # Times of reading a group's weights from memory, and of a tile of each width but 1 whose weights are in the cache
    # (cpu_kernels.program.choose_width). Measured with Q4_K on one thread of a Zen 5, in times of two tokens; Q8_0 is
    # alike. Where nothing was measured, by tokens.
    tile_times: tuple[float, ...]
    # Accumulators in a register tile of attention, limited for the same reason.
    attention_vectors: int
    # Added to signed bytes as they are stored, 128 if products take unsigned weights and 0 if signed ones.
    byte_offset: int = 128
    # Products of small bytes are summed in 16-bit lanes (pmaddubsw) before they are widened, because no instruction
    # adds them to 32-bit lanes.
    int16_accumulators: bool = False
    # Whether an instruction converts half precision.
    converts_halves: bool = True
    # The fewest tiles for which unpacking a super-block of weights once for all of them pays off, None for never.
    panel_tiles: int | None = None
    # Tiles that take turns at each 256 values of the weights, so that memory stays busy.
    interleaved_tiles: int = 1
    # Whether the float sums of a tile of 32-value blocks fit into registers.
    sums_in_registers: bool = False
    # Whether products of 16-bit words are summed in 32-bit lanes by one instruction, twice as many in a register as
    # floats. Then text encoders' weights in half precision are packed as words (cpu_kernels.formats.words).
    multiplies_words: bool = False
    # Default prefetch distances of weights in bytes, by kind of cpu_kernels.records.Ahead; cpu_kernels.tuning measures
    # better ones.
    prefetch: tuple[int, int, int] = (1024, 2048, 4096)


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl"})
_WIDE, _AVX, _NARROW = (1, 2, 4, 8, 12), (1, 2, 3, 4), (1, 2, 4)
_BY_TOKENS = (1.0, 2.0, 4.0)
_FAR = (6144, 8192, 12288)
_AVX512_VNNI = Policy(
    requires=_AVX512 | {"avx512vnni"},
    cpu="x86-64-v4",
    extras="+avx512vnni",
    tuning="+fast-dpwssd",
    vector_parts=1,
    tile_widths=_WIDE,
    tile_times=(2.2, 1.0, 1.57, 2.85, 4.15),
    attention_vectors=8,
    sums_in_registers=True,
    multiplies_words=True,
    prefetch=_FAR,
)

POLICIES: Mapping[Isa, Policy] = {
    Isa.AVX512_VNNI: _AVX512_VNNI,
    Isa.AVX_VNNI: Policy(
        requires=_AVX2 | {"avxvnni"},
        cpu="x86-64-v3",
        extras="+avxvnni",
        vector_parts=2,
        tile_widths=_AVX,
        tile_times=(1.5, 1.0, 1.6, 1.92),
        attention_vectors=4,
        panel_tiles=2,
        interleaved_tiles=4,
        prefetch=_FAR,
    ),
    Isa.AVX512: replace(
        _AVX512_VNNI,
        requires=_AVX512,
        extras="",
        tuning="",
        tile_times=(2.05, 1.0, 1.81, 3.3, 4.9),
        byte_offset=0,
        int16_accumulators=True,
        multiplies_words=False,
    ),
    Isa.AVX2: Policy(
        requires=_AVX2,
        cpu="x86-64-v3",
        vector_parts=2,
        tile_widths=_AVX,
        tile_times=(1.6, 1.0, 1.58, 1.92),
        attention_vectors=4,
        byte_offset=0,
        int16_accumulators=True,
        panel_tiles=2,
        interleaved_tiles=4,
    ),
    Isa.NEON_DOT: Policy(
        requires=frozenset({"neon", "dotprod"}),
        cpu="generic",
        extras="+neon,+dotprod",
        tuned_for="neoverse-v2",
        vector_parts=4,
        tile_widths=_NARROW,
        tile_times=_BY_TOKENS,
        attention_vectors=4,
        byte_offset=0,
        panel_tiles=4,
    ),
    Isa.PORTABLE: Policy(
        requires=frozenset(),
        cpu="x86-64" if "x86" in _TRIPLE else "generic",
        vector_parts=4,
        tile_widths=_NARROW,
        tile_times=_BY_TOKENS,
        attention_vectors=4,
        converts_halves=False,
    ),
}


def object_triple(system: str) -> str:
    """The triple of the objects that kernels are compiled to on a system, given its own.

    On Windows they are ELF files too, with Windows' calling convention: LLVM links those in memory without the symbols
    that COFF files expect of a program's image.
    """
    return f"{system}-elf" if "windows" in system else system


@dataclass(frozen=True)
class Target:
    """The code generator's target: an instruction set, and LLVM's names of processor, features and system."""

    isa: Isa
    cpu: str
    features: str
    triple: str = object_triple(_TRIPLE)


def target_features(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Features that LLVM may use: those of NUMBA_CPU_FEATURES if it is set, else the processor's."""
    override = environment.get("NUMBA_CPU_FEATURES")
    if override is not None:
        return frozenset(item[1:] for item in override.split(",") if item.startswith("+"))
    if IS_ARM64:
        return arm_features()
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


def choose_isa(features: frozenset[str], forced: str | None = None) -> Isa:
    """Return the forced instruction set, or the first whose features are all present.

    Raises UnusableIsaError if the forced name is unknown or the processor lacks its features.
    """
    if forced:
        names = [isa.value for isa in Isa]
        if forced not in names:
            raise UnusableIsaError(f"{ISA_VARIABLE}={forced!r}: unknown. Choose one of {', '.join(names)}.")
        missing = POLICIES[Isa(forced)].requires - features
        if missing:
            lacks = ", ".join(sorted(missing))
            raise UnusableIsaError(f"{ISA_VARIABLE}={forced}: this processor lacks {lacks}. Choose another one.")
        return Isa(forced)
    return next(isa for isa in Isa if features >= POLICIES[isa].requires)


def plain_target(isa: Isa) -> Target:
    """The target with an instruction set and no features beyond it."""
    return Target(isa, POLICIES[isa].cpu, POLICIES[isa].extras)


def choose_target(environment: Mapping[str, str] = os.environ) -> Target:
    """The target that LOCALLLM_ISA forces, else that of NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, else this processor.

    Raises UnusableIsaError as choose_isa does.
    """
    forced = environment.get(ISA_VARIABLE)
    isa = choose_isa(target_features(environment), forced)
    if forced:
        return plain_target(isa)
    if IS_ARM64:
        # A processor's name would let LLVM use features that this system may not offer.
        cpu, present = "generic", ",".join(f"+{name}" for name in sorted(arm_features()))
    else:
        cpu, present = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    return Target(isa, environment.get("NUMBA_CPU_NAME") or cpu, environment.get("NUMBA_CPU_FEATURES", present))


TARGET = choose_target()
ISA = TARGET.isa
POLICY = POLICIES[ISA]
_emitted = [ISA]


def emitted_isa() -> Isa:
    """The instruction set that code is being emitted for: ISA, except in a portable build of a kernel.

    The memory layout of data follows POLICY in both cases.
    """
    return _emitted[-1]


def emits(feature: str) -> bool:
    """Whether the code being emitted may use an LLVM feature beyond those that its instruction set requires."""
    return emitted_isa() is ISA and f"+{feature}" in TARGET.features.split(",")


@contextmanager
def emitting(isa: Isa) -> Iterator[None]:
    """Emit code for an instruction set within the context. For the compiler, which holds a lock meanwhile."""
    _emitted.append(isa)
    try:
        yield
    finally:
        _emitted.pop()
