"""Run as a script: print a digest of every kind of arithmetic kernels do, for whatever LOCALLLM_ISA says.

Printed as JSON: the instruction set, and by name the SHA-256 of results, so that instruction sets can be compared.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from kernel_harness import ALL_FORMS, Activations, Matrix, address, aligned, operation, random_weights, run_on_threads

from cpu_kernels import activations
from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.isa import ISA
from cpu_kernels.kernel import Kernel
from cpu_kernels.records import Act, argument
from cpu_kernels.simd.arithmetic import mask_bits, xor_i32
from cpu_kernels.simd.dot import BYTE_OFFSET, biased_start, dot2, multiply_biased, multiply_short, widen_short
from cpu_kernels.simd.lookup import lookup
from cpu_kernels.simd.vectors import constant, define, i32x16, load_i32, splat_i32, store_i32

TABLE = tuple((37 * i + 11) % 256 for i in range(16))
VECTORS = 64
RESULTS = 4
_SMALL, _STORED = 0x7F7F7F7F, np.int32((BYTE_OFFSET * 0x01010101 + 2**31) % 2**32 - 2**31)
_lookup = lookup("lookup_probe", TABLE)


def _small(builder, acc, u, s):
    short = multiply_short(builder, constant(i32x16.llvm, 0), u, s)
    return builder.add(acc, widen_short(builder, short))


def _biased(builder, acc, sums, stored, s):
    start = biased_start(builder, sums)
    return builder.add(acc, multiply_biased(builder, start, stored, s))


_dot4_small = define("dot4_small", i32x16(i32x16, i32x16, i32x16), _small)
_dot4_biased = define("dot4_biased", i32x16(i32x16, i32x16, i32x16, i32x16), _biased)


def _primitives(op: int, step: int, thread: int, threads: int) -> None:
    """Arguments: 0 accumulators, 1 first operands, 2 second operands, 3 nibbles, 4 -128 * sums of the second operands,
    5 out (four results a vector)."""
    for i in range(VECTORS):
        acc, x, y = load_i32(argument(op, 0) + i * 64), load_i32(argument(op, 1) + i * 64), argument(op, 2) + i * 64
        out = argument(op, 5) + i * 64 * RESULTS
        store_i32(out, _dot4_small(acc, mask_bits(x, _SMALL), load_i32(y)))
        store_i32(out + 64, dot2(acc, x, load_i32(y)))
        store_i32(out + 128, _lookup(load_i32(argument(op, 3) + i * 64)))
        stored = xor_i32(x, splat_i32(_STORED))
        store_i32(out + 192, _dot4_biased(acc, load_i32(argument(op, 4) + i * 64), stored, load_i32(y)))


# The cache knows the sources of cpu_kernels, not this file's.
_NAME = f"isa_probe.{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"
primitives = Kernel(_primitives, _NAME)


def run_primitives() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Results of the primitives as int32[vector, result, lane], and their inputs as bytes."""
    rng = np.random.default_rng(10)
    inputs = {name: aligned(VECTORS * 64) for name in ("accumulators", "first", "second", "nibbles")}
    for name, array in inputs.items():
        array[:] = rng.integers(0, 16 if name == "nibbles" else 256, array.size)
    # The extremes, where narrower products would saturate; activations are never -128.
    inputs["second"][inputs["second"] == 128] = 127
    inputs["first"][:128], inputs["first"][128:192] = 127, 128
    inputs["second"][:64], inputs["second"][64:192] = 127, 129
    inputs["accumulators"].view(np.int32)[:] >>= 8
    inputs["sums"] = aligned(VECTORS * 64)
    sums = inputs["second"].view(np.int8).reshape(-1, 4).sum(axis=1, dtype=np.int32)
    inputs["sums"].view(np.int32)[:] = -128 * sums
    out = aligned(VECTORS * 16 * RESULTS, np.int32)
    op = operation(*(address(array) for array in inputs.values()), address(out))
    run_on_threads(primitives, op, op, 1)
    return out.reshape(VECTORS, RESULTS, 16), inputs


def results() -> dict[str, np.ndarray]:
    """Arrays to compare, by name."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((5, 256)).astype(np.float32)
    found = {"primitives": run_primitives()[0]}
    for name in ("Q5_0", "Q8_0", "Q4_K", "Q6_K"):
        matrix = Matrix.pack(WEIGHT_FORMATS[name], random_weights(name, 32, 256), 256)
        found[f"{name} gemv"] = matrix.multiply(x[:1], 1)
        found[f"{name} tile"] = matrix.multiply(x, 4)
    gate = aligned(x.size, np.float32)
    gate[:] = x.ravel()
    act = Activations(256)
    op = operation(address(gate), address(gate), 1024, 256, ALL_FORMS, address(act.descriptors), activations.GATE_GELU)
    run_on_threads(activations.gate_pack, op, act.step(5, 4), 1)
    # How a sum of sixteen is kept is each instruction set's own affair; what it does is seen in Q6_K's products.
    found["gate"] = np.concatenate([buffer for i, buffer in enumerate(act.buffers[0]) if i != Act.SUM16])
    return found


if __name__ == "__main__":
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in results().items()}
    json.dump({"isa": ISA.value, "digests": digests}, sys.stdout)
