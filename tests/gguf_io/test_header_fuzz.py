"""Mutated real files and generated hostile ones: each gives a ModelFileError, or a model with valid contents."""

import os
import random
import shutil
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path

import gguf  # noqa: F401 - loaded before memory is counted
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_io import ModelFile, open_model
from gguf_io.errors import ModelFileError
from gguf_io.metadata import MetadataArray
from gguf_io.system import write_at
from tests.gguf_io.handmade import array, gguf_file, key, string, tensor, u32

MUTATIONS_PER_FILE = 1500
CORPUS = [
    "src/stories260K.gguf",
    "gguf/stories260K-F16.gguf",
    "gguf/stories260K-Q4_K_M-fallback.gguf",
    "gguf/stories260K-pad256-Q4_K_M.gguf",
    "gguf/tinystories656K-Q8_0.gguf",
    "gguf/tinystories656K-pad256-Q4_K_M.gguf",
]
# Boundary values of integer arithmetic.
EDGES = [0, 1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
EDGES += [2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 33, 2**64 - 32, 2**64 - 1]


def accepts(path: Path) -> bool:
    """Open the file and read all of it. False if it was refused; any other exception is a bug in the reader."""
    try:
        with open_model(path) as model:
            check_promises(model, path.stat().st_size)
            return True
    except ModelFileError as error:
        assert str(error).startswith(str(path.parent))
        assert len(str(error)) < 4000
        return False


def check_promises(model: ModelFile, size: int) -> None:
    for value in model.metadata.values():
        assert not isinstance(value, MetadataArray) or len(list(value)) == len(value)
    infos = sorted(model.tensors.values(), key=lambda info: info.offset)
    for before, after in pairwise(infos):
        assert before.offset + before.nbytes <= after.offset
    for info in infos:
        assert 0 < info.offset < info.offset + info.nbytes <= size
        assert info.offset % model.alignment == 0
        assert model.data(info.name).nbytes == info.nbytes
    if infos:
        assert model.dequantize(infos[0].name).shape == infos[0].shape
    assert len(model.identity()) == 64


def mutate(header: bytes, rng: random.Random) -> tuple[int, bytes]:
    """Which bytes to write where: bit flips, edge values as 32 or 64 bits, swapped ranges, zeros."""
    at = rng.randrange(4, len(header))
    kind = rng.randrange(5)
    if kind == 0:
        return at, bytes([header[at] ^ 1 << rng.randrange(8)])
    if kind == 1:
        return at, struct.pack("<Q", rng.choice(EDGES))
    if kind == 2:
        return at, struct.pack("<I", rng.choice(EDGES) % 2**32)
    if kind == 3:
        source = rng.randrange(len(header))
        return at, header[source : source + rng.randrange(1, 64)]
    return at, bytes(rng.randrange(1, 16))


def places(header: bytes, rng: random.Random) -> bytes:
    """The range to mutate: the fixed fields, the first keys, or everything."""
    return rng.choice([header[:32], header[:256], header])


@pytest.mark.parametrize("name", CORPUS)
def test_mutated_headers_of_real_files(name: str, data_dir: Path, tmp_path: Path) -> None:
    original = data_dir / "models" / name
    path = tmp_path / "mutated.gguf"
    shutil.copyfile(original, path)
    with open_model(original) as model:
        header = original.read_bytes()[: min(info.offset for info in model.tensors.values())]
    rng = random.Random(name)
    accepted = 0
    with path.open("r+b", buffering=0) as file:
        for _ in range(MUTATIONS_PER_FILE):
            for _ in range(rng.randint(1, 3)):
                at, change = mutate(places(header, rng), rng)
                write_at(file.fileno(), change[: len(header) - at], at)
            accepted += accepts(path)
            write_at(file.fileno(), header, 0)
    assert accepts(path)
    assert 0 < accepted < MUTATIONS_PER_FILE  # both outcomes occurred


@pytest.mark.parametrize("name", CORPUS)
def test_truncated_real_files(name: str, data_dir: Path, tmp_path: Path) -> None:
    content = (data_dir / "models" / name).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    rng = random.Random(name)
    for length in sorted(rng.sample(range(len(content) - 4096), 40), reverse=True):
        os.truncate(path, length)
        assert not accepts(path)


numbers = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**64 - 1), st.integers(0, 64))
small = numbers.map(lambda number: number % 2**32)
names = st.one_of(st.sampled_from(["a", "b", "general.alignment", "split.count", "split.no"]), st.text(max_size=8))
keys = st.one_of(
    st.builds(u32, names, small),
    st.builds(array, names, st.integers(0, 13), numbers, st.binary(max_size=64)),
    st.builds(key, names, small, st.binary(max_size=32)),
    st.builds(string, names, numbers),
    st.binary(max_size=40),
)
sane_dims = st.lists(st.sampled_from([1, 2, 32, 64, 256]), min_size=1, max_size=4)
offsets = st.one_of(st.integers(0, 8).map(lambda block: block * 32), numbers)
tensors = st.builds(
    tensor,
    st.one_of(st.sampled_from("abcdef"), names),
    st.one_of(sane_dims, st.lists(numbers, max_size=6)),
    st.one_of(st.integers(0, 42), small),
    offsets,
)
files = st.builds(
    gguf_file,
    st.lists(keys, max_size=4),
    st.lists(tensors, max_size=4),
    st.integers(0, 2048).map(bytes),
    version=st.sampled_from([2, 3, 3, 3, 1, 0, 0x03000000, 2**32 - 1]),
    key_count=st.one_of(st.none(), st.none(), numbers),
    tensor_count=st.one_of(st.none(), st.none(), numbers),
)


@settings(max_examples=600)
@given(content=files)
def test_generated_headers(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "generated.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        accepts(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 + 100 * len(content)
