"""Script: print digests of kernel results with the instruction set that LOCALLLM_ISA names, as JSON.

Arguments: the types of keys and values, separated by commas, and the weight formats.

It prints the instruction set, the SHA-256 of results by name, for comparing instruction sets, and the names of products
that differ between tile widths or thread counts. All tile widths share one loop, so only the narrowest and the widest
are compiled for each format, and the others for two formats. For those two the kernels that pack and unpack rows are
compiled too; the interpreter packs the rows of the others.
"""

import hashlib
import json
import sys
from collections.abc import Sequence

import numpy as np

from cpu_kernels import activations
from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.isa import ISA
from cpu_kernels.kv_types import OF_HEADS, KVType
from cpu_kernels.records import TILE_WIDTHS, Act
from tests.cpu_kernels import test_attention_kernels as attention
from tests.cpu_kernels.kernel_harness import (
    ALL_FORMS,
    Activations,
    Matrix,
    address,
    aligned,
    operation,
    random_weights,
    run_on_threads,
)

ROWS, K = 64, 512
ALL_WIDTHS = ("Q8_0", "Q4_K")
# Attention kernels take longest to compile: wide tiles with one type and with two types of keys and values; narrow
# ones.
_I16, _Q8_0, _Q4_0 = KVType.I16, KVType.Q8_0, KVType.Q4_0
ATTENTION = [
    (attention.SHAPES[at], types)
    for at in (4, 7)
    for types in ((_I16, _I16), (_Q8_0, _Q8_0), (_Q4_0, _Q4_0), (_Q8_0, _I16))
] + [(attention.SHAPES[6], (_I16, _I16))]


def products(formats: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Results by format, and the names of those that depend on tile width or threads."""
    random = np.random.default_rng(11)
    # More tiles than share one unpacked panel, the last one not full.
    x = random.standard_normal((4 * TILE_WIDTHS[-1] + 1, K)).astype(np.float32)
    found, differing = {}, []
    for name in formats:
        whole = name in ALL_WIDTHS
        matrix = Matrix.pack(WEIGHT_FORMATS[name], random_weights(name, ROWS, K), K, 3, interpreted=not whole)
        alone = matrix.multiply(x, 1)
        found[name] = alone[:5]
        if whole:
            found[f"{name} as floats"] = matrix.embed([0, ROWS - 1, 17])
        for width in TILE_WIDTHS if whole else (TILE_WIDTHS[0], TILE_WIDTHS[-1]):
            for rows, threads in ((len(x), 5), (width + 1, 2)):
                if not np.array_equal(matrix.multiply(x[:rows], width, threads), alone[:rows]):
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


def attended(kinds: Sequence[str]) -> dict[str, np.ndarray]:
    """Attention over pages that the kernels have filled; compared with NumPy for several divisions among threads."""
    found = {}
    for shape, types in ATTENTION:
        if not set(types) <= set(kinds):
            continue
        attention.test_attention_is_numpy_s(shape, types)
        case = attention.Case(shape, types)
        case.store(threads=5)
        found[attention_name(shape, types)] = case.attend(threads=5, split=True)
    return found


def results(
    kinds: Sequence[str] = OF_HEADS, formats: Sequence[str] = tuple(WEIGHT_FORMATS)
) -> tuple[dict[str, str], list[str]]:
    """Digests to compare, by name, and what already differs on this instruction set."""
    found, differing = products(formats)
    found |= {"gates": gates()} | attended(kinds)
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in found.items()}, differing


if __name__ == "__main__":
    digests, differing = results(sys.argv[1].split(","), sys.argv[2:])
    json.dump({"isa": ISA.value, "digests": digests, "differing": differing}, sys.stdout)
