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
from cpu_kernels.records import argument
from cpu_kernels.simd.dot import dot2, dot4
from cpu_kernels.simd.lookup import lookup
from cpu_kernels.simd.vectors import load_i32, store_i32

TABLE = tuple((37 * i + 11) % 256 for i in range(16))
VECTORS = 64
_lookup = lookup("lookup_probe", TABLE)


def _primitives(op: int, step: int, thread: int, threads: int) -> None:
    """Arguments: 0 accumulators, 1 first operands, 2 second operands, 3 nibbles, 4 out (three results a vector)."""
    for i in range(VECTORS):
        acc, x, y = load_i32(argument(op, 0) + i * 64), load_i32(argument(op, 1) + i * 64), argument(op, 2) + i * 64
        out = argument(op, 4) + i * 192
        store_i32(out, dot4(acc, x, load_i32(y)))
        store_i32(out + 64, dot2(acc, x, load_i32(y)))
        store_i32(out + 128, _lookup(load_i32(argument(op, 3) + i * 64)))


# The cache knows the sources of cpu_kernels, not this file's.
_NAME = f"isa_probe.{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"
primitives = Kernel(_primitives, _NAME)


def run_primitives() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Results of the primitives as int32[vector, 3, lane], and their inputs as bytes."""
    rng = np.random.default_rng(10)
    inputs = {name: aligned(VECTORS * 64) for name in ("accumulators", "first", "second", "nibbles")}
    for name, array in inputs.items():
        array[:] = rng.integers(0, 16 if name == "nibbles" else 256, array.size)
    # The extremes, where narrower products would saturate.
    inputs["first"][:64] = 255
    inputs["second"][:64] = 127
    inputs["second"][64:128] = 128
    inputs["first"][64:128] = 255
    inputs["accumulators"].view(np.int32)[:] >>= 8
    out = aligned(VECTORS * 48, np.int32)
    op = operation(*(address(array) for array in inputs.values()), address(out))
    run_on_threads(primitives, op, op, 1)
    return out.reshape(VECTORS, 3, 16), inputs


def results() -> dict[str, np.ndarray]:
    """Arrays to compare, by name."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((5, 256)).astype(np.float32)
    found = {"primitives": run_primitives()[0]}
    for name in ("Q5_0", "Q4_K"):
        matrix = Matrix.pack(WEIGHT_FORMATS[name], random_weights(name, 32, 256), 256)
        found[f"{name} gemv"] = matrix.multiply(x[:1], 1)
        found[f"{name} tile"] = matrix.multiply(x, 4)
    gate = aligned(x.size, np.float32)
    gate[:] = x.ravel()
    act = Activations(256)
    op = operation(address(gate), address(gate), 1024, 256, ALL_FORMS, address(act.descriptors), activations.GATE_GELU)
    run_on_threads(activations.gate_pack, op, act.step(5, 4), 1)
    found["gate"] = np.concatenate(act.buffers[0])
    return found


if __name__ == "__main__":
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in results().items()}
    json.dump({"isa": ISA.value, "digests": digests}, sys.stdout)
