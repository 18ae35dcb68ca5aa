"""Instruction sets: which is chosen, that all give the same bits, and the code emitted for other processors."""

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llvmlite import binding, ir

from cpu_kernels import isa
from cpu_kernels.compiler import SYMBOLS, compile_kernel
from cpu_kernels.formats.codec import NIBBLES
from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.isa import (
    IS_ARM64,
    ISA,
    ISA_VARIABLE,
    POLICIES,
    POLICY,
    Isa,
    choose_isa,
    choose_target,
    emitting,
    plain_target,
    target_features,
)
from cpu_kernels.kernel import load_object
from cpu_kernels.kv_types import OF_HEADS
from cpu_kernels.records import argument
from cpu_kernels.simd import bytes as products
from cpu_kernels.simd.vectors import (
    get_f16,
    get_f32,
    i32x16,
    load_f16,
    load_f32,
    put_f16,
    put_f32,
    scatter_f16,
    store_f32,
)
from tests.cpu_kernels.isa_probe import ALL_WIDTHS, ATTENTION, SHORT, Attention, attention_name, results
from tests.cpu_kernels.kernel_harness import address, aligned, operation

ROOT = Path(__file__).parents[2]
X86_V3 = frozenset({"avx2", "fma", "f16c"})
X86_V4 = X86_V3 | {"avx512f", "avx512bw", "avx512vl"}
# Compiling all formats takes minutes per set. One for each way of multiplying, scaling and summing: those in a comment
# call the same functions as the format before it, as far as their instructions depend on the set.
PRODUCTS = (
    "Q8_0",  # IQ4_XS, MXFP4
    "IQ4_NL",
    "Q4_0",  # Q5_0, Q1_0, Q2_0
    "Q5_1",  # Q4_1
    "Q2_K",  # Q3_K, Q6_K
    "Q4_K",  # Q5_K
    "IQ3_S",  # the other I-quants
)
FORMATS = (*PRODUCTS, "F16", "NVFP4", "Q3_K", "Q6_K", "TQ1_0")
TABLE = tuple((37 * i + 11) % 256 for i in range(16))


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (X86_V4 | {"avx512vnni", "avxvnni"}, Isa.AVX512_VNNI),
        (X86_V3 | {"avxvnni"}, Isa.AVX_VNNI),
        (X86_V4, Isa.AVX512),
        (X86_V3, Isa.AVX2),
        (frozenset({"avx2"}), Isa.PORTABLE),
        (frozenset({"neon", "dotprod"}), Isa.NEON_DOT),
        (frozenset({"neon"}), Isa.PORTABLE),
        (frozenset(), Isa.PORTABLE),
    ],
)
def test_the_best_instruction_set_present_is_chosen(features: frozenset[str], expected: Isa) -> None:
    assert choose_isa(features) is expected


def test_a_forced_instruction_set_is_taken_or_refused_by_name() -> None:
    assert choose_isa(X86_V4, "avx2") is Isa.AVX2
    assert choose_isa(X86_V4, "portable") is Isa.PORTABLE
    with pytest.raises(ValueError, match="avx1024"):
        choose_isa(X86_V4, "avx1024")
    with pytest.raises(ValueError, match="lacks dotprod, neon"):
        choose_isa(X86_V4, "neon-dot")


def test_code_targets_a_forced_instruction_set_or_numbas_processor() -> None:
    assert choose_target({ISA_VARIABLE: "portable"}) == plain_target(Isa.PORTABLE)
    named = choose_target({"NUMBA_CPU_NAME": "znver3", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"})
    assert (named.isa, named.cpu, named.features) == (Isa.AVX2, "znver3", "+avx2,+fma,+f16c")
    assert choose_target({}).cpu == ("generic" if IS_ARM64 else binding.get_host_cpu_name())


def test_arm_processors_get_what_the_system_says_and_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM's name of a processor brings features that a system may hide, and its list of features is incomplete."""
    monkeypatch.setattr(isa, "IS_ARM64", True)
    monkeypatch.setattr(isa, "arm_features", lambda: frozenset({"neon", "dotprod", "lse"}))
    found = choose_target({})
    assert (found.isa, found.cpu, found.features) == (Isa.NEON_DOT, "generic", "+dotprod,+lse,+neon")
    monkeypatch.setattr(isa, "arm_features", lambda: frozenset({"neon"}))
    assert choose_target({}).isa is Isa.PORTABLE


@pytest.fixture(scope="module")
def digests_here() -> dict[str, str]:
    digests, differing = results(OF_HEADS, tuple(WEIGHT_FORMATS), [*ATTENTION, *SHORT])
    assert not differing
    return digests


def on(isa: Isa, how: str, kinds: Sequence[str], formats: Sequence[str], **variables: str) -> Any:
    """What the probe prints for an instruction set."""
    environment = {**os.environ, ISA_VARIABLE: isa.value, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "tests.cpu_kernels.isa_probe", how, ",".join(kinds), *formats]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "not used" not in done.stderr  # a build whose results differ from its source's
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("isa", Isa)
def test_kernels_are_written_alike_for_all_instruction_sets(isa: Isa, digests_here: dict[str, str]) -> None:
    """Every format, and attention with every pair of types, as each set's policy lays out data, by the interpreter.

    They are compared with what is compiled for this processor; it need not have the set.
    """
    features = ",".join(f"+{name}" for name in sorted(POLICIES[isa].requires))
    answer = on(isa, "interpreted", OF_HEADS, tuple(WEIGHT_FORMATS), NUMBA_CPU_FEATURES=features)
    expected = {name: digest for name, digest in digests_here.items() if name not in names(ATTENTION)}
    assert answer == {"isa": isa, "digests": expected, "differing": []}


@pytest.mark.slow
@pytest.mark.parametrize("isa", [isa for isa in Isa if isa is not Isa.NEON_DOT])
def test_instruction_sets_agree_to_the_bit(isa: Isa, digests_here: dict[str, str]) -> None:
    """Products, gates and attention, compiled for nothing beyond the instruction set.

    They are compared with this processor's own set with all of its features. Each kernel is compared with its source
    before it is used.
    """
    missing = POLICIES[isa].requires - target_features()
    if missing:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    # On the sets that differ most all of these, and keys and values of all types; on the others what differs, and the
    # widest and the narrowest.
    formats = {ISA: (ALL_WIDTHS,), Isa.AVX_VNNI: PRODUCTS, Isa.AVX512: PRODUCTS}.get(isa, FORMATS)
    kinds = {ISA: ("q4_0",), Isa.AVX_VNNI: ("i16", "q4_0"), Isa.AVX512: ("i16", "q4_0")}.get(isa, OF_HEADS)
    skipped = [f"{name}{suffix}" for name in set(WEIGHT_FORMATS) - set(formats) for suffix in ("", " as floats")]
    skipped += names([*SHORT, *(each for each in ATTENTION if not set(each[1]) <= set(kinds))])
    expected = {name: digest for name, digest in digests_here.items() if name not in skipped}
    assert on(isa, "compiled", kinds, formats) == {"isa": isa, "digests": expected, "differing": []}


def names(cases: Sequence[Attention]) -> list[str]:
    """The names of their results."""
    return [attention_name(*case) for case in cases]


def assembly(emit, arguments: int, triple: str, features: str) -> str:
    """Compile out = emit(builder, *vectors in memory) for another processor."""
    module = ir.Module()
    module.triple = triple
    pointer = i32x16.llvm.as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer] * (arguments + 1)), "probe")
    builder = ir.IRBuilder(function.append_basic_block())
    vectors = [builder.load(arg, typ=i32x16.llvm) for arg in function.args[1:]]
    builder.store(emit(builder, *vectors), function.args[0])
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(features=features, opt=3)
    compiled = binding.parse_assembly(str(module))
    compiled.verify()
    return machine.emit_assembly(compiled)


@pytest.mark.parametrize(
    ("isa", "triple", "features", "small", "any_byte"),
    [
        (
            Isa.AVX512_VNNI,
            "x86_64-linux-gnu",
            "+avx512f,+avx512bw,+avx512vl,+avx512vnni",
            {"vpdpbusd": 1},
            {"vpdpbusd": 1},
        ),
        (Isa.AVX_VNNI, "x86_64-linux-gnu", "+avx2,+fma,+f16c,+avxvnni", {"vpdpbusd": 2}, {"vpdpbusd": 2}),
        (
            Isa.AVX512,
            "x86_64-linux-gnu",
            "+avx512f,+avx512bw,+avx512vl",
            {"vpmaddubsw": 1, "vpaddw": 1, "vpmaddwd": 0},
            {"vpmaddubsw": 1, "vpmaddwd": 1},
        ),
        (
            Isa.AVX2,
            "x86_64-linux-gnu",
            "+avx2,+fma,+f16c",
            {"vpmaddubsw": 2, "vpaddw": 2, "vpmaddwd": 0},
            {"vpmaddubsw": 2, "vpsignb": 2, "vpmaddwd": 2},
        ),
        (
            Isa.NEON_DOT,
            "aarch64-linux-gnu",
            "+neon,+dotprod",
            {"sdot": 4, "eor": 0, "add": 0},
            {"sdot": 4, "eor": 0, "add": 0},
        ),
    ],
)
def test_products_become_the_instructions_they_are_for(
    isa: Isa,
    triple: str,
    features: str,
    small: dict[str, int],
    any_byte: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "POLICY", POLICIES[isa])
    for emit, expected in ((products.multiply_small, small), (products.multiply_offset, any_byte)):
        with emitting(isa):
            text = assembly(emit, 3, triple, features)
        assert {name: len(re.findall(rf"\b{name}\b", text)) for name in expected} == expected


def test_on_arm_one_load_has_the_factors_of_four_products() -> None:
    def emit(builder: ir.IRBuilder, acc: ir.Value, weights: ir.Value, where: ir.Value) -> ir.Value:
        x = builder.extract_element(builder.bitcast(where, ir.VectorType(ir.IntType(64), 8)), ir.IntType(32)(0))
        for index in range(4):
            acc = products.multiply_small(builder, acc, weights, products.operand(builder, x, index))
        return acc

    with emitting(Isa.NEON_DOT):
        text = assembly(emit, 3, "aarch64-linux-gnu", "+neon,+dotprod")
    lanes = re.findall(r"\bsdot\s.*\.4b\[(\d)\]", text)
    assert sorted(lanes) == ["0"] * 4 + ["1"] * 4 + ["2"] * 4 + ["3"] * 4
    assert not re.search(r"\b(dup|ld1r)\b", text)


def test_on_arm_upper_nibbles_need_a_shift_alone() -> None:
    def emit(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
        p = builder.extract_element(builder.bitcast(where, ir.VectorType(ir.IntType(64), 8)), ir.IntType(32)(0))
        return NIBBLES.emit(builder, p, 4)

    with emitting(Isa.NEON_DOT):
        text = assembly(emit, 1, "aarch64-linux-gnu", "+neon,+dotprod")
    assert len(re.findall(r"\bushr\s+v\d+\.16b", text)) == 4
    assert not re.search(r"\band\b", text)


@pytest.mark.parametrize("layout", [Isa.AVX2, Isa.AVX_VNNI, Isa.NEON_DOT])
@pytest.mark.parametrize(
    ("triple", "features", "isa"),
    [
        ("aarch64-linux-gnu", "+neon", Isa.PORTABLE),
        ("aarch64-linux-gnu", "+neon,+dotprod", Isa.NEON_DOT),
        ("x86_64-linux-gnu", "", Isa.PORTABLE),
    ],
)
def test_all_primitives_compile_without_calls(
    triple: str, features: str, isa: Isa, layout: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Independent of the layout in which an instruction set keeps sums."""
    monkeypatch.setattr(products, "POLICY", POLICIES[layout])
    for emit, arguments in (
        (products.multiply_small, 3),
        (products.multiply_offset, 3),
        (products.multiply_words, 3),
        (products.widen_partial, 2),
        (lambda builder, nibbles: products.look_up(builder, TABLE, nibbles), 1),
    ):
        with emitting(isa):
            text = assembly(emit, arguments, triple, features)
        assert not re.search(r"^\s*(bl|callq?)\s", text, re.MULTILINE)


FOREIGN = """
import sys
from dataclasses import replace
from llvmlite import binding
from cpu_kernels import isa
isa.TARGET = replace(isa.plain_target(isa.Isa("neon-dot")), triple="aarch64-unknown-linux-gnu")
isa.ISA, isa.POLICY = isa.TARGET.isa, isa.POLICIES[isa.TARGET.isa]
emitting = isa.emitting(isa.ISA)
emitting.__enter__()
binding.initialize_all_targets()
binding.initialize_all_asmprinters()
from cpu_kernels import activations, attention, compiler, experts, kv_store, norms, sums, threads
from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.kernel import Kernel
from cpu_kernels.kv_types import OF_HEADS
kernels = [each for module in (activations, experts, norms, sums, threads) for each in vars(module).values()]
kernels += [kv_store.KERNELS[types, types] for types in OF_HEADS]
kernels += [attention.attention_kernel(types, types, 4) for types in OF_HEADS]
for name in sys.argv[1:]:
    weights = WEIGHT_FORMATS[name]
    kernels += [weights.matmul[4]]
    kernels += [weights.repack, weights.embed] if name in ("Q8_0", "Q4_K", "IQ3_S", "F16") else []
for kernel in kernels:
    if isinstance(kernel, Kernel):
        code = compiler.compile_kernel(kernel.make(), "kernel", isa.TARGET)
        print(kernel.name, int.from_bytes(code[18:20], "little"), *compiler._called(code))
"""
AARCH64 = "183"
"""The machine in the header of an ELF file (e_machine in elf(5))."""


@pytest.mark.slow
def test_kernels_compile_for_another_processor_and_call_what_they_may() -> None:
    command = [sys.executable, "-c", FOREIGN, *FORMATS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert len(compiled) > 3 * len(FORMATS)
    assert {machine for _, machine, *_ in compiled} == {AARCH64}
    called = {name for _, _, *names in compiled for name in names}
    assert called and called <= set(SYMBOLS)


def _convert(op: int, step: int, thread: int, threads: int) -> None:
    """Arguments: 0 halves, 1 out as floats, 2 floats, 3 out as halves, 4 vectors; the last of each alone."""
    for i in range(argument(op, 4)):
        store_f32(argument(op, 1) + 64 * i, load_f16(argument(op, 0) + 32 * i))
        scatter_f16(argument(op, 3) + 32 * i, 2, load_f32(argument(op, 2) + 64 * i))
    last = argument(op, 4) * 16
    put_f32(argument(op, 1) + 4 * last, get_f16(argument(op, 0) + 2 * last))
    put_f16(argument(op, 3) + 2 * last, get_f32(argument(op, 2) + 4 * last))


@pytest.mark.parametrize("isa", [Isa.PORTABLE, None])
def test_half_precision_is_converted_as_numpy_does(isa: Isa | None) -> None:
    """All half-precision numbers, with and without a conversion instruction."""
    random = np.random.default_rng(3)
    halves = aligned(65536 + 16, np.float16)
    halves.view(np.uint16)[:65536] = np.arange(65536)
    floats = aligned(halves.size, np.float32)
    floats[:] = random.standard_normal(floats.size) * 10.0 ** random.uniform(-9, 6, floats.size)
    floats[:8] = (0.0, -0.0, np.inf, -np.inf, np.nan, 65519.0, 65520.0, 2.0**-25)
    floats[8:16] = (
        2.0**-24 * 1.5,
        2.0**-14,
        2.0**-14 * (1 - 2.0**-11),
        1 + 2.0**-11,
        1 + 3 * 2.0**-11,
        1e-30,
        -1e30,
        1,
    )
    wide, narrow = aligned(floats.size, np.float32), aligned(floats.size, np.float16)
    op = operation(*map(address, (halves, wide, floats, narrow)), halves.size // 16 - 1)
    target = choose_target() if isa is None else plain_target(isa)
    function = ctypes.CFUNCTYPE(None, *([ctypes.c_int64] * 4))(load_object(compile_kernel(_convert, "c", target), "c"))
    function(address(op), 0, 0, 1)
    count = halves.size - 15
    np.testing.assert_array_equal(wide[:count], halves[:count].astype(np.float32))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(narrow[:count], floats[:count].astype(np.float16))


def test_int16_accumulators_hold_what_they_are_given() -> None:
    """The limit that formats rely on: eight steps of nibbles, or four of five-bit values, with the
    largest activations.
    """
    assert products.PARTIAL_LIMIT * 2 * 127 <= 32767
    assert products.PARTIAL_LIMIT >= 8 * 15 and products.PARTIAL_LIMIT >= 4 * 31
    assert products.BYTE_OFFSET == 0 or not POLICY.int16_accumulators
