"""A model's memory planned from its header, against the memory that the loaded model takes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.program import ProgramBuilder
from gguf_io import open_model
from gguf_io.blocks import BLOCK_TYPES
from models import weights
from models.native_runner import NativeRunner
from models.needs import native_needs, touched_bytes
from models.text_encoder import TextEncoder, encoder_needs
from tests.gguf_files import copying, finish
from tests.models.architecture_models import MODELS
from tests.models.encoders import ENCODERS, in_type
from tests.models.synthetic import Synthetic, write

HUGE_PAGE = 2 << 20
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")


@pytest.fixture
def builders(monkeypatch: pytest.MonkeyPatch) -> list[ProgramBuilder]:
    """The builders of programs recorded from now on: of a plan, and of the load if it does not use the plan's."""
    made: list[ProgramBuilder] = []

    def builder() -> ProgramBuilder:
        made.append(ProgramBuilder())
        return made[-1]

    monkeypatch.setattr(weights, "ProgramBuilder", builder)
    return made


COUNTED = ("llama", "gemma3", "gpt-oss", "glm4moe", "lfm2", "phi2", "granitemoe", "cohere2")
COUNTED_SCANS = ("granitehybrid", "falcon-h1", "nemotron_h", "mamba2")


@pytest.mark.parametrize("name", COUNTED + COUNTED_SCANS)
def test_the_header_counts_the_arrays_of_the_loaded_model(
    name: str, tmp_path: Path, builders: list[ProgramBuilder]
) -> None:
    with open_model(write(MODELS[name], tmp_path / "small.gguf")) as file:
        needs = native_needs(file, threads=2)
        recorded = len(builders)
        NativeRunner(file, kv_bytes=1 << 20, threads=2).close()
    assert len(builders) == recorded, "it was recorded once"
    beside = needs.weights + needs.buffers - touched_bytes(builders[0])
    # Memory that is not an array of the program: logits of a row, and the states of short convolutions.
    rows = -(-MODELS[name].vocabulary // 32) * 32 * 4
    convolutions = MODELS[name].extra["attention.head_count_kv"].count(0) if name == "lfm2" else 0
    assert beside == rows + convolutions * 64 * 2 * MODELS[name].embedding * 4


@pytest.mark.parametrize("kind", ["F32", "F16"])
@pytest.mark.parametrize("name", ["bert", "nomic-bert"])
def test_the_header_counts_the_arrays_of_an_encoder(
    name: str, kind: str, tmp_path: Path, builders: list[ProgramBuilder]
) -> None:
    path = in_type(write(ENCODERS[name], tmp_path / "small.gguf"), tmp_path / f"{kind}.gguf", kind)
    with open_model(path) as file:
        needs = encoder_needs(file, threads=2)
        planned = len(builders)
        TextEncoder(file, threads=2).close()
    assert (
        0 < needs.total(0) - sum(map(touched_bytes, builders[planned:])) < 0.2 * needs.buffers
    )  # one layer's keys and values


# The packed bytes of a tensor of each type, and by how much they make the process grow.
_PACK = """
import json, sys
from gguf_io import open_model
from cpu_kernels.threads import ThreadTeam
from localllm.placement.loaded_model import release_memory
from models.weights import WeightLoader

def anonymous():
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("RssAnon"))

team = ThreadTeam(1)
for path in sys.argv[1:]:
    with open_model(path) as file:
        for round in range(2):  # the first compiles, and grows what stays
            loader = WeightLoader(file)
            before = anonymous()
            loader.matrix("token_embd.weight", *file.tensors["token_embd.weight"].shape)
            loader.load(team)
            release_memory()  # what converting a piece took and has freed
            grown = anonymous() - before
            del loader
    print(json.dumps([path, grown]), flush=True)
"""


@linux
@pytest.mark.slow
def test_weights_of_every_type_take_what_is_planned(tmp_path: Path) -> None:
    rows, k = 8192, 2048
    paths = {}
    for name, block in computed_types():
        paths[name] = tmp_path / f"{name}.gguf"
        random = np.random.default_rng(1)
        data = random.integers(0, 60, (rows, block.row_bytes(k)), np.uint8)  # no infinite scale in any type
        write_types(paths[name], data, name)
    command = [sys.executable, "-c", _PACK, *map(str, paths.values())]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    grown = {Path(path).stem: size for path, size in map(json.loads, output.splitlines())}
    assert set(grown) == set(paths)
    for name, path in paths.items():
        with open_model(path) as file:
            planned = native_needs(file, threads=1)
        assert abs(grown[name] - planned.weights) < 0.05 * planned.weights + HUGE_PAGE, name


def computed_types() -> Iterator[tuple[str, Any]]:
    """The block types that the native engine supports and gguf can write."""
    for block in BLOCK_TYPES.values():
        if block.name in gguf.GGMLQuantizationType.__members__ and block.name in WEIGHT_FORMATS:
            yield block.name, block


def write_types(path: Path, data: np.ndarray, name: str) -> None:
    """A model that is nearly all embedding, tied, of one type."""
    model = Synthetic("llama", layers=1, embedding=2048, feed_forward=32, heads=1, kv_heads=1, head=32, vocabulary=8192)
    small = write(model, path.with_suffix(".small"))
    reader, writer = copying(small, path)
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType[name])
        else:
            writer.add_tensor(tensor.name, tensor.data)
    finish(writer)
    del reader, writer, tensor  # Windows removes no file that is mapped
    small.unlink()
