"""Every weight format on every instruction set of this processor, compared with its limits and llama.cpp.

    formats.py [--formats Q4_K,Q8_0] [--isas native,avx2] [--threads 1] [--rounds 3] [--floors]

Each format gets a model of random blocks, as wide as one of 1.5 B parameters, in a temporary folder (up to 1 GB). Shown
are the share of memory reading in decode, the share of multiplying in prefill, and both speeds as multiples of
llama.cpp's, which always uses all instructions of the processor. With --floors, the exit status is 1 if a figure is
below its floor.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.engine_tools import table
from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.isa import ISA_VARIABLE, POLICIES, Isa, target_features
from gguf_io import BLOCK_TYPES
from tests.cpu_kernels.kernel_harness import random_weights
from tests.gguf_files import finish
from tests.models.synthetic import Synthetic, shapes

SHAPE = Synthetic(
    "llama",
    layers=4,
    embedding=2048,
    feed_forward=5632,
    heads=16,
    kv_heads=4,
    head=128,
    vocabulary=20480,
    extra={"rope.dimension_count": 128},
)
NATIVE = "native"
# The lowest shares of reading and of multiplying, by prefix of the format; "" is for all others.
# Grid lookups cost more than reading does, IQ1's 2,048 points most. NVFP4 sums activations again for every sixteen
# rows, since its scales cover 16 values.
FLOORS = {"IQ4": (0.6, 0.4), "IQ1": (0.1, 0.3), "IQ": (0.2, 0.3), "TQ": (0.5, 0.4), "NV": (0.6, 0.25), "": (0.6, 0.4)}


def write(path: Path, kind: str) -> None:
    """Write the model with all matrices in the format `kind`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(SHAPE.vocabulary)
    writer.add_block_count(SHAPE.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(SHAPE.embedding)
    writer.add_feed_forward_length(SHAPE.feed_forward)
    writer.add_head_count(SHAPE.heads)
    writer.add_head_count_kv(SHAPE.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(SHAPE.head)
    block = next(each for each in BLOCK_TYPES.values() if each.name == kind)
    for name, shape in shapes(SHAPE).items():
        if len(shape) == 1:
            writer.add_tensor(name, random_weights("F32", 1, shape[0]).view("f4")[0])
        else:
            writer.add_tensor(name, random_weights(kind, *shape).reshape(shape[0], -1).view(np.int8))
            info = writer.tensors[-1][name]  # by number, since the gguf package does not know every type
            info.shape, info.dtype = shape, block.type_id
    finish(writer)


def measure(path: Path, isa: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prefill and decode rows of compare_llama_cpp for one file, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.compare_llama_cpp", str(path), "--json"]
    command += ["--prefill", "256", "--decode", "12", "--threads", arguments.threads, "--rounds", str(arguments.rounds)]
    if arguments.threads == "1":
        command.append("--processor-time")
    forced = {} if isa == NATIVE else {ISA_VARIABLE: isa}
    done = subprocess.run(command, env={**os.environ, **forced}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{path.stem} on {isa}: {done.stderr[-1000:]}")
    return {row["measure"].split()[0]: row for row in json.loads(done.stdout)}


def floors(kind: str) -> tuple[float, float]:
    """The floors of a format."""
    return next(floor for prefix, floor in FLOORS.items() if kind.startswith(prefix))


def main() -> int:
    """Parse the command line, measure, print; return 1 if --floors is given and a figure is below its floor."""
    here = [isa.value for isa in Isa if not POLICIES[isa].requires - target_features()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(WEIGHT_FORMATS))
    parser.add_argument("--isas", default=NATIVE, help=f"with commas, of {NATIVE}, {', '.join(here)}")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floors", action="store_true")
    arguments = parser.parse_args()
    rows, low = [], []
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.formats.split(","):
            path = Path(folder) / f"{kind}.gguf"
            write(path, kind)
            for isa in arguments.isas.split(","):
                found = measure(path, isa, arguments)
                decode, prefill = found["decode"], found["prefill"]
                shares = decode["of_limit"], prefill["of_limit"]
                rows.append((kind, isa, *shares, decode["ratio"], prefill["ratio"]))
                sys.stderr.write(f"{kind} {isa}: {shares[0]:.0%} {shares[1]:.0%}\n")
                if isa == NATIVE and any(share < floor for share, floor in zip(shares, floors(kind), strict=True)):
                    low.append(kind)
            path.unlink()
    table(("format", "instructions", "of reading", "of multiplying", "decode x", "prefill x"), rows)
    if low and arguments.floors:
        sys.stderr.write(f"below the floor: {', '.join(low)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
