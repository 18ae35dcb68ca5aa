"""Run as a script: print digests of what kernels compute with the instruction set that LOCALLLM_ISA names, as JSON.

Arguments: the types of keys and values, separated by commas, and the weight formats.

Printed are the instruction set, by name the SHA-256 of results, so that instruction sets can be compared, and names of
products that differ between tile widths or numbers of threads. All tile widths are those of one loop: the narrowest and
the widest are compiled for each format, the others for two.
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
# Attention's kernels take the longest to compile: wide tiles, of keys and values of one type and of two; narrow ones.
_I16, _Q8_0, _Q4_0 = KVType.I16, KVType.Q8_0, KVType.Q4_0
ATTENTION = [
    (attention.SHAPES[at], types)
    for at in (4, 7)
    for types in ((_I16, _I16), (_Q8_0, _Q8_0), (_Q4_0, _Q4_0), (_Q8_0, _I16))
] + [(attention.SHAPES[6], (_I16, _I16))]


def products(formats: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Results by format, and what depends on the width of tiles or on threads."""
    random = np.random.default_rng(11)
    # More tiles than share what they unpack, and one that is not full.
    x = random.standard_normal((4 * TILE_WIDTHS[-1] + 1, K)).astype(np.float32)
    found, differing = {}, []
    for name in formats:
        matrix = Matrix.pack(WEIGHT_FORMATS[name], random_weights(name, ROWS, K), K, 3)
        alone = matrix.multiply(x, 1)
        found[name] = alone[:5]
        found[f"{name} as floats"] = matrix.embed([0, ROWS - 1, 17])
        for width in TILE_WIDTHS if name in ALL_WIDTHS else (TILE_WIDTHS[0], TILE_WIDTHS[-1]):
            for rows, threads in ((len(x), 5), (width + 1, 2)):
                if not np.array_equal(matrix.multiply(x[:rows], width, threads), alone[:rows]):
                    differing.append(f"{name} with tiles of {width}")
    return found, differing


def gates() -> np.ndarray:
    """What gates pack, but for sums that each instruction set keeps in its own way."""
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
    """The name of a result of attention."""
    return f"{shape} {types}"


def attended(kinds: Sequence[str]) -> dict[str, np.ndarray]:
    """Attention over pages that the kernels have filled; it must be NumPy's too, however it is shared out."""
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
    """Digests to compare, by name, and what differs already."""
    found, differing = products(formats)
    found |= {"gates": gates()} | attended(kinds)
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in found.items()}, differing


if __name__ == "__main__":
    digests, differing = results(sys.argv[1].split(","), sys.argv[2:])
    json.dump({"isa": ISA.value, "digests": digests, "differing": differing}, sys.stdout)
