"""Loading takes little more memory than the file, and leaves nothing of the file mapped."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models.architecture_models import MODELS
from tests.models.synthetic import Synthetic, write

LARGE = Synthetic(
    "llama", layers=4, embedding=1024, feed_forward=4096, heads=16, vocabulary=8192, tied=False,
    extra={"rope.dimension_count": 64},
)  # fmt: skip
SMALL = Synthetic("llama", tied=False, extra={"rope.dimension_count": 64})

# Peak and resident sizes of a second load, after a first one has brought in the libraries.
_SCRIPT = """
import json, sys
from gguf_io import open_model
from models import NativeRunner

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


# Nearly all of it is the table of second embeddings.
TABLE = replace(MODELS["gemma4"], vocabulary=65536)
_TABLE_BYTES = 65536 * 10 * 32 * 4


def grown_by_loading(small: Path, large: Path) -> dict[str, int]:
    """Bytes by which loading a file raises this process's peak, its size, and what it maps of files."""
    command = [sys.executable, "-c", _SCRIPT, str(small), str(large)]
    subprocess.run(command, check=True, capture_output=True)  # compiles kernels, which takes memory of its own
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    grown: dict[str, int] = json.loads(output.splitlines()[-1])
    return grown


needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")


@needs_proc
def test_a_table_of_second_embeddings_stays_in_the_file(tmp_path: Path) -> None:
    small, large = write(MODELS["gemma4"], tmp_path / "small.gguf"), write(TABLE, tmp_path / "large.gguf")
    grown = grown_by_loading(small, large)
    assert grown["VmRSS"] < 1.2 * (large.stat().st_size - _TABLE_BYTES)
    assert grown["RssFile"] < 0.02 * large.stat().st_size


@needs_proc
def test_peak_while_loading(tmp_path: Path) -> None:
    small, large = write(SMALL, tmp_path / "small.gguf"), write(LARGE, tmp_path / "large.gguf")
    grown = grown_by_loading(small, large)
    size = large.stat().st_size
    assert grown["VmHWM"] < 1.2 * size
    assert grown["RssFile"] < 0.02 * size
