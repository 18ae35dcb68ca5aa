"""Script: print digests of kernel results with the instruction set that LOCALLLM_ISA names, as JSON.

Arguments: "compiled" or "interpreted", the types of keys and values, separated by commas, and the weight formats.

It prints the instruction set, the SHA-256 of results by name, for comparing instruction sets, and the names of products
that differ between tile widths or thread counts. Interpreted kernels run as Python: slowly, but none is compiled, and
no instruction of the set is needed. All tile widths share one loop, so only the widest is compiled for each format, and
all for one, whose kernels that pack and unpack rows are compiled too; the interpreter packs the rows of the others.
"""

import functools
import hashlib
import json
import sys
from collections.abc import Sequence

import numpy as np

from cpu_kernels import activations
from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.isa import ISA, POLICY
from cpu_kernels.kernel import Function, Kernel
from cpu_kernels.kv_types import OF_HEADS, KVType
from cpu_kernels.records import TILE_WIDTHS, Act
from tests.cpu_kernels import test_attention_kernels as attention
from tests.cpu_kernels.kernel_harness import (
    ALL_FORMS,
    Activations,
    Matrix,
    address,
    aligned,
    extreme_weights,
    operation,
    run_on_threads,
)

ROWS, K = 64, 512
WIDEST = TILE_WIDTHS[-1]
ALL_WIDTHS = "Q4_K"
Attention = tuple[attention.Shape, tuple[KVType, KVType]]
# Attention kernels take longest to compile: wide tiles with one type of keys and values, and narrow ones.
ATTENTION: list[Attention] = [(attention.SHAPES[at], (kind, kind)) for at in (4, 7) for kind in OF_HEADS]
ATTENTION += [(attention.SHAPES[6], (KVType.I16, KVType.I16))]
# For the interpreter: all types, in wide tiles, and narrow ones with a window.
SHORT: list[Attention] = [
    (attention.Shape(heads=1, group=8, size=64, tokens=40, rows=3), types) for types in attention.TYPES
]
SHORT += [(attention.Shape(heads=2, group=4, size=32, tokens=40, rows=9, window=20), (kind, kind)) for kind in OF_HEADS]


def products(formats: Sequence[str], interpreted: bool) -> tuple[dict[str, np.ndarray], list[str]]:
    """Results by format, and the names of those that depend on tile width or threads."""
    random = np.random.default_rng(11)
    # More tiles than share one unpacked panel, the last one not full; two, for the interpreter, if none do.
    x = random.standard_normal((4 * WIDEST + 1, K)).astype(np.float32)
    x[1], x[2] = 1.0, -1.0  # the largest sums with the largest weights
    found, differing = {}, []
    for name in formats:
        whole = name == ALL_WIDTHS
        matrix = Matrix.pack(WEIGHT_FORMATS[name], extreme_weights(name, ROWS, K), K, 3, interpreted=not whole)
        some = x[: WIDEST + 1] if interpreted and not POLICY.panel_tiles else x
        alone = matrix.multiply(some, WIDEST)
        found[name] = alone[:5]
        if whole:
            found[f"{name} as floats"] = matrix.embed([0, ROWS - 1, 17])
        for width in (1, 2) if interpreted else TILE_WIDTHS if whole else (WIDEST,):
            for rows, threads in ((3, 2),) if interpreted else ((len(x), 5), (width + 1, 2)):
                if not np.array_equal(matrix.multiply(some[:rows], width, threads), alone[:rows]):
                    differing.append(f"{name} with tiles of {width}")
    return found, differing


def gates() -> np.ndarray:
    """What gates pack, without the sums, whose layout differs between instruction sets."""
    random = np.random.default_rng(12)
    packed = []
    for kind in range(4):
        act, gate = Activations(256), aligned(5 * 256, np.float32)
        gate[:] = 4 * random.standard_normal(gate.size)
        op = operation(address(gate), address(gate), 1024, 256, ALL_FORMS, address(act.descriptors), kind)
        run_on_threads(activations.gate_pack, op, act.step(5, 4), 5)
        packed += [buffer for i, buffer in enumerate(act.buffers[0]) if i != Act.SUM16]
    return np.concatenate(packed)


def attention_name(shape: attention.Shape, types: tuple[KVType, KVType]) -> str:
    """The name of an attention result."""
    return f"{shape} {types}"


def attended(kinds: Sequence[str], cases: Sequence[Attention]) -> dict[str, np.ndarray]:
    """Attention over pages that the kernels have filled; longer ones are compared with NumPy, and for several divisions
    among threads.
    """
    found = {}
    for shape, types in cases:
        if not set(types) <= set(kinds):
            continue
        if cases is ATTENTION:
            attention.test_attention_is_numpy_s(shape, types)
        case = attention.Case(shape, types)
        case.store(threads=5)
        found[attention_name(shape, types)] = case.attend(threads=5, split=True)
    return found


def results(
    kinds: Sequence[str], formats: Sequence[str], cases: Sequence[Attention], interpreted: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Digests to compare, by name, and what already differs on this instruction set."""
    found, differing = products(formats, interpreted)
    found |= {"gates": gates()} | attended(kinds, cases)
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in found.items()}, differing


def interpret(kernel: Kernel, op: int, step: int, thread: int, threads: int) -> None:
    """Run the Python function that a kernel is compiled from."""
    source(kernel)(op, step, thread, threads)


@functools.cache
def source(kernel: Kernel) -> Function:
    """The function that a kernel is compiled from."""
    return kernel.make()


if __name__ == "__main__":
    interpreted = sys.argv[1] == "interpreted"
    if interpreted:
        Kernel.__call__ = interpret  # type: ignore[method-assign]
    digests, differing = results(sys.argv[2].split(","), sys.argv[3:], SHORT if interpreted else ATTENTION, interpreted)
    json.dump({"isa": ISA.value, "digests": digests, "differing": differing}, sys.stdout)
