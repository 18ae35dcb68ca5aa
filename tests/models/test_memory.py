"""Loading takes little more memory than the file, leaves nothing of the file mapped, and takes what the plan says."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gguf_io import open_model
from models.config import read_config
from models.kv_layout import state_bytes
from models.needs import native_needs
from tests.models.architecture_models import MODELS
from tests.models.synthetic import Synthetic, write

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")

LARGE = Synthetic(
    "llama", layers=4, embedding=1024, feed_forward=4096, heads=16, vocabulary=8192, tied=False,
    extra={"rope.dimension_count": 64},
)  # fmt: skip
# Nearly all buffers are used, and enough is stored to be measurable.
WHOLE = {
    "llama": replace(LARGE, layers=6),
    "lfm2": replace(
        MODELS["lfm2"], embedding=1024, feed_forward=4096, heads=16, kv_heads=8, vocabulary=8192,
        extra={"shortconv.l_cache": 3, "attention.head_count_kv": [0, 0, 8, 0, 8]},
    ),
    "qwen3moe": replace(
        MODELS["qwen3moe"], embedding=1024, heads=16, vocabulary=8192,
        extra={"expert_used_count": 2, "expert_feed_forward_length": 1024}, layers=3,
    ),
    "granitehybrid": replace(
        MODELS["granitehybrid"], embedding=1024, feed_forward=4096, heads=16, kv_heads=8, vocabulary=8192,
        extra={
            **MODELS["granitehybrid"].extra, "attention.head_count_kv": [0, 0, 8, 0, 8], "ssm.state_size": 128,
            "ssm.time_step_rank": 32, "ssm.inner_size": 2048,
        },
    ),
}  # fmt: skip
STORED = 640  # tokens: whole groups of pages
SMALL = Synthetic("llama", tied=False, extra={"rope.dimension_count": 64})

# Peak and resident sizes of a second load, after a first one has loaded the libraries.
_SCRIPT = """
import json, sys
from gguf_io import open_model
from models.native_runner import NativeRunner

def status():
    lines = open("/proc/self/status").read().splitlines()
    return {k: int(v.split()[0]) * 1024 for k, v in (l.split(":") for l in lines) if k in ("VmHWM", "VmRSS", "RssFile")}

def load(path):
    with open_model(path) as file:
        return NativeRunner(file, kv_bytes=1 << 20)

small = load(sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = status()
large = load(sys.argv[2])
after = status()
print(json.dumps({key: after[key] - before[key] for key in after}))
"""


# How much the process grows while it computes a prompt, after a small model has done the same.
_WHOLE_SCRIPT = """
import sys
from gguf_io import open_model
from models.native_runner import NativeRunner

def anonymous():
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("RssAnon"))

def compute(path, stored):
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=64 << 20, threads=2)
    sequence = runner.create_sequence()
    for first in range(0, stored, 512):
        rows = min(512, stored - first)
        runner.run([1] * rows, range(first, first + rows), [sequence] * rows, [rows - 1])
    return runner

small = compute(sys.argv[1], 512)
before = anonymous()
large = compute(sys.argv[2], int(sys.argv[3]))
print(anonymous() - before)
"""


@linux
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_computing_model_takes_what_was_planned(name: str, tmp_path: Path) -> None:
    small = write(MODELS[name], tmp_path / "small.gguf")
    large = write(WHOLE[name], tmp_path / "large.gguf")
    command = [sys.executable, "-c", _WHOLE_SCRIPT, str(small), str(large), str(STORED)]
    subprocess.run(command, check=True, capture_output=True)  # compiles kernels, which takes memory of its own
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    with open_model(large) as file:
        needs, states = native_needs(file, threads=2), state_bytes(read_config(file), 64 << 20)
    stored = STORED * needs.kv_per_token + min(STORED, needs.window_tokens) * needs.window_per_token
    planned = needs.weights + needs.buffers + states + stored + STORED * needs.position_bytes
    assert abs(grown - planned) < 0.05 * planned


# Nearly all of it is the table of second embeddings.
TABLE = replace(MODELS["gemma4"], vocabulary=65536)
_TABLE_BYTES = 65536 * 10 * 32 * 4


def grown_by_loading(small: Path, large: Path) -> dict[str, int]:
    """By how many bytes loading a file raises this process's peak and size, and how much of files it maps."""
    command = [sys.executable, "-c", _SCRIPT, str(small), str(large)]
    subprocess.run(command, check=True, capture_output=True)  # compiles kernels, which takes memory of its own
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    grown: dict[str, int] = json.loads(output.splitlines()[-1])
    return grown


@linux
def test_a_table_of_second_embeddings_stays_in_the_file(tmp_path: Path) -> None:
    small, large = write(MODELS["gemma4"], tmp_path / "small.gguf"), write(TABLE, tmp_path / "large.gguf")
    grown = grown_by_loading(small, large)
    assert grown["VmRSS"] < 1.2 * (large.stat().st_size - _TABLE_BYTES)
    assert grown["RssFile"] < 0.02 * large.stat().st_size


@linux
def test_peak_while_loading(tmp_path: Path) -> None:
    small, large = write(SMALL, tmp_path / "small.gguf"), write(LARGE, tmp_path / "large.gguf")
    grown = grown_by_loading(small, large)
    size = large.stat().st_size
    assert grown["VmHWM"] < 1.2 * size
    assert grown["RssFile"] < 0.02 * size
