"""A packed file returns what was packed, bit for bit, or reports that it is damaged."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cpu_kernels.threads import ThreadTeam
from gguf_io import open_model
from models.native_runner import NativeRunner
from models.packed_file import DamagedError, PackedWeights, PackedWriter, map_packed, parts_of, read_about
from models.weights import WeightLoader
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tests.models.test_needs import computed_types, write_types

NAME = "token_embd.weight"


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    opened = ThreadTeam(2)
    yield opened
    opened.close()


def written(path: Path, packed: dict[str, np.ndarray], about: dict[str, object] | None = None) -> Path:
    with open(path, "wb", buffering=0) as file:
        writer = PackedWriter(file.fileno())
        for name, matrix in packed.items():
            writer.put(name, parts_of(matrix, lambda: None))
        writer.finish(about or {})
    return path


def mapped(path: Path) -> PackedWeights:
    with open(path, "rb", buffering=0) as file:
        found = map_packed(file.fileno(), 2)
    found.check()
    return found


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("name", [name for name, _ in computed_types()])
def test_every_type_of_weights_comes_back_to_the_bit(name: str, team: ThreadTeam, tmp_path: Path) -> None:
    block = dict(computed_types())[name]
    data = np.random.default_rng(1).integers(0, 60, (96, block.row_bytes(512)), np.uint8)
    write_types(tmp_path / "model.gguf", data, name)
    orders = [None, np.arange(96)[::-1].copy()]
    with open_model(tmp_path / "model.gguf") as file:
        fresh, again = (WeightLoader(file) for _ in range(2))
        for order in orders:
            assert again.matrix(NAME, 96, 512, order).group_bytes == fresh.matrix(NAME, 96, 512, order).group_bytes
        fresh.load(team)
        ready = mapped(written(tmp_path / "packed", fresh.packed))
        again.load(team, ready=ready)
    plain, turned = fresh.packed.values()
    assert not np.array_equal(plain, turned)
    for identity, packed in fresh.packed.items():
        np.testing.assert_array_equal(again.packed[identity], packed)
        assert not np.shares_memory(again.packed[identity], packed), "it was mapped"


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "glm4moe", "lfm2", "deepseek2", "qwen35moe"])
def test_models_compute_the_same_bits(name: str, tmp_path: Path) -> None:
    with open_model(write(MODELS[name], tmp_path / "model.gguf")) as file:
        fresh = NativeRunner(file, kv_bytes=1 << 20, threads=2)
        ready = mapped(written(tmp_path / "packed", fresh.packed))
        again = NativeRunner(file, kv_bytes=1 << 20, threads=2, ready=ready)
    assert ready.bytes == sum(each.nbytes for each in again.packed.values())
    assert all(again.packed[each] is not fresh.packed[each] for each in fresh.packed)
    results = []
    for runner in (fresh, again):
        sequence = runner.create_sequence()
        results.append(runner.run([5, 6, 7], [0, 1, 2], [sequence] * 3, [0, 1, 2]).copy())
        runner.close()
    np.testing.assert_array_equal(*results)


def test_matrices_of_any_size_come_back(tmp_path: Path) -> None:
    packed = {str(size): random_bytes(size, size) for size in (64, 4096, 4160, 1 << 20, (1 << 20) + 64, 5_000_000)}
    path = written(tmp_path / "packed", packed, {"key": "k"})
    found = mapped(path)
    for name, matrix in packed.items():
        np.testing.assert_array_equal(found.find(name, matrix.nbytes), matrix)
    assert found.find("64", 128) is None and found.find("other", 64) is None
    with open(path, "rb") as file:
        assert read_about(file.fileno()) == {"key": "k"}


def test_it_can_be_removed_while_it_is_mapped(tmp_path: Path) -> None:
    matrix = random_bytes(3_000_000)
    path = written(tmp_path / "packed", {"m": matrix})
    found = mapped(path)
    path.unlink()
    np.testing.assert_array_equal(found.find("m", matrix.nbytes), matrix)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("where", ["matrices", "index", "trailer"])
def test_a_single_bit_is_noticed(where: str, place: float, tmp_path: Path) -> None:
    path = written(tmp_path / "packed", {"a": random_bytes(1_500_000), "b": random_bytes(8192, 1)})
    size, trailer = path.stat().st_size, 56
    body = 1_500_000 // 4096 * 4096 + 4096 + 8192
    first, stop = {"matrices": (0, 1_500_000), "index": (body, size - trailer), "trailer": (size - trailer, size)}[
        where
    ]
    data = bytearray(path.read_bytes())
    data[first + int(place * (stop - first))] ^= 16
    path.write_bytes(data)
    with pytest.raises(DamagedError):
        mapped(path)


@pytest.mark.parametrize("left", [0, 1, 55, 4096, 1_000_000, -1])
def test_a_cut_file_is_noticed(left: int, tmp_path: Path) -> None:
    path = written(tmp_path / "packed", {"a": random_bytes(1_500_000)})
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    with pytest.raises(DamagedError):
        mapped(path)


def test_pieces_that_changed_places_are_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "packed", {"a": random_bytes(1 << 20), "b": random_bytes(1 << 20, 1)})
    data = path.read_bytes()
    path.write_bytes(data[1 << 20 : 2 << 20] + data[: 1 << 20] + data[2 << 20 :])
    with pytest.raises(DamagedError):
        mapped(path)


def test_a_file_that_is_cut_meanwhile_is_noticed(tmp_path: Path) -> None:
    """Between reading the index and the check, before anything is computed."""
    path = written(tmp_path / "packed", {"a": random_bytes(40_000_000)})
    with open(path, "rb", buffering=0) as file:
        found = map_packed(file.fileno(), 1)
        os.truncate(path, 4096)
        with pytest.raises(DamagedError, match="truncated"):
            found.check()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\0" * 4096, b"localllm packed\x01" * 10])
def test_other_files_are_not_taken(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "packed"
    path.write_bytes(content)
    with pytest.raises(DamagedError):
        mapped(path)
