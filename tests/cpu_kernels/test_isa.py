"""Instruction sets: which is chosen, that all agree to the bit, and what is emitted for other processors."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from isa_probe import TABLE, results, run_primitives
from llvmlite import binding, ir

from cpu_kernels.isa import ISA_VARIABLE, REQUIRED_FEATURES, Isa, choose_isa, target_features
from cpu_kernels.simd import dot, lookup
from cpu_kernels.simd.vectors import i32x16

X86_V3 = frozenset({"avx2", "fma", "f16c"})
X86_V4 = X86_V3 | {"avx512f", "avx512bw", "avx512vl"}


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


def test_primitives_are_exact() -> None:
    out, inputs = run_primitives()
    acc = inputs["accumulators"].view(np.int32).reshape(-1, 16).astype(np.int64)
    first = inputs["first"].reshape(-1, 16, 4).astype(np.int64)
    second = inputs["second"].view(np.int8).reshape(-1, 16, 4).astype(np.int64)
    np.testing.assert_array_equal(out[:, 0], acc + ((first & 127) * second).sum(axis=2))
    signed = inputs["first"].view(np.int8).reshape(-1, 16, 4).astype(np.int64)
    np.testing.assert_array_equal(out[:, 3], acc + (signed * second).sum(axis=2))
    words = [inputs[name].view(np.int16).reshape(-1, 16, 2).astype(np.int64) for name in ("first", "second")]
    expected = acc + (words[0] * words[1]).sum(axis=2)
    np.testing.assert_array_equal(out[:, 1], expected.astype(np.int32))
    entries = np.array(TABLE, dtype=np.uint8)[inputs["nibbles"]]
    np.testing.assert_array_equal(out[:, 2], entries.view(np.int32).reshape(-1, 16))


@pytest.fixture(scope="module")
def digests_here() -> dict[str, np.ndarray]:
    return results()


@pytest.mark.slow
@pytest.mark.parametrize("isa", [isa for isa in Isa if isa not in (Isa.NEON_DOT, Isa.AVX512_VNNI)])
def test_instruction_sets_agree_to_the_bit(isa: Isa, digests_here: dict[str, np.ndarray]) -> None:
    missing = REQUIRED_FEATURES[isa] - target_features()
    if missing:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1])])
    environment = {**os.environ, ISA_VARIABLE: isa.value, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, here / "isa_probe.py"], env=environment, capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    assert answer["isa"] == isa
    assert answer["digests"] == {
        name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in digests_here.items()
    }


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
    ("isa", "triple", "features", "small", "biased"),
    [
        (
            Isa.AVX512_VNNI,
            "x86_64-linux-gnu",
            "+avx512f,+avx512bw,+avx512vl,+avx512vnni",
            {"vpdpbusd": 1},
            {"vpdpbusd": 1},
        ),
        (Isa.AVX_VNNI, "x86_64-linux-gnu", "+avx2,+fma,+f16c,+avxvnni", {"vpdpbusd": 2}, {"vpdpbusd": 2}),
        (Isa.AVX512, "x86_64-linux-gnu", "+avx512f,+avx512bw,+avx512vl", {"vpmaddwd": 2}, {"vpmaddwd": 2}),
        (
            Isa.AVX2,
            "x86_64-linux-gnu",
            "+avx2,+fma,+f16c",
            {"vpmaddubsw": 2, "vpaddw": 2, "vpmaddwd": 0},
            {"vpmaddubsw": 2, "vpsignb": 2, "vpmaddwd": 2},
        ),
        (Isa.NEON_DOT, "aarch64-linux-gnu", "+neon,+dotprod", {"sdot": 8}, {"sdot": 8}),
    ],
)
def test_products_become_the_instructions_they_are_for(
    isa: Isa,
    triple: str,
    features: str,
    small: dict[str, int],
    biased: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dot, "ISA", isa)
    for emit, expected in ((dot.multiply_short, small), (dot.multiply_biased, biased)):
        text = assembly(emit, 3, triple, features)
        assert {name: len(re.findall(rf"\b{name}\b", text)) for name in expected} == expected


@pytest.mark.parametrize(
    ("triple", "features", "isa"),
    [
        ("aarch64-linux-gnu", "+neon", Isa.PORTABLE),
        ("aarch64-linux-gnu", "+neon,+dotprod", Isa.NEON_DOT),
        ("x86_64-linux-gnu", "", Isa.PORTABLE),
    ],
)
def test_all_primitives_compile_without_calls(
    triple: str, features: str, isa: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dot, "ISA", isa)
    monkeypatch.setattr(lookup, "ISA", isa)
    for emit, arguments in (
        (dot.multiply_short, 3),
        (dot.multiply_biased, 3),
        (dot.multiply_pairs, 3),
        (lambda builder, nibbles: lookup.table_bytes(builder, TABLE, nibbles), 1),
    ):
        text = assembly(emit, arguments, triple, features)
        assert not re.search(r"^\s*(bl|callq?)\s", text, re.MULTILINE)
