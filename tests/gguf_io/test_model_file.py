"""Open model files: real ones against gguf.GGUFReader, split ones, and files that change while they are open."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter, quants

from gguf_io import BLOCK_TYPES, ModelFile, open_model
from gguf_io.errors import ModelFileError
from gguf_io.metadata import MetadataArray
from gguf_io.model_file import SLACK_BYTES
from gguf_io.system import replace
from tests.gguf_files import finish
from tests.gguf_io.handmade import gguf_file, tensor, text
from tests.systems import ON_WINE

REAL = [
    "models/src/stories260K.gguf",
    "models/gguf/stories260K-F16.gguf",
    "models/gguf/stories260K-Q4_K_M-fallback.gguf",
    "models/gguf/stories260K-pad256-Q4_K_M.gguf",
    "models/gguf/tinystories656K-Q8_0.gguf",
    "models/gguf/tinystories656K-pad256-Q4_K_M.gguf",
    "vocab/ggml-vocab-llama-spm.gguf",
]


def write_model(path: Path, tensors: dict[str, np.ndarray[Any, Any]], **options: int) -> None:
    writer = GGUFWriter(path, "llama", **options)
    writer.add_name("Small")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    rng = np.random.default_rng(1)
    write_model(path, {f"w{i}": rng.normal(size=(5, 64, 32)).astype(np.float32) for i in range(3)})
    return path


@pytest.fixture
def split(tmp_path: Path) -> tuple[list[Path], dict[str, np.ndarray[Any, Any]]]:
    tensors = {f"w{i}": np.full((3, 32), i, np.float32) for i in range(5)}
    write_model(tmp_path / "big.gguf", tensors, split_max_tensors=2)
    paths = sorted(tmp_path.glob("big-*-of-00003.gguf"))
    assert len(paths) == 3
    return paths, tensors


@pytest.mark.parametrize("name", REAL)
def test_real_files_read_as_ggufs_reader_reads_them(name: str, data_dir: Path) -> None:
    reader = GGUFReader(data_dir / name)
    with open_model(data_dir / name) as model:
        keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert {k: list(v) if isinstance(v, MetadataArray) else v for k, v in model.metadata.items()} == keys
        assert model.architecture == keys["general.architecture"]
        assert model.alignment == reader.alignment
        assert list(model.tensors) == [theirs.name for theirs in reader.tensors]
        for theirs in reader.tensors:
            ours = model.tensors[theirs.name]
            assert ours.shape == tuple(theirs.shape[::-1].tolist())
            assert (ours.type.name, ours.offset, ours.nbytes) == (
                theirs.tensor_type.name,
                theirs.data_offset,
                theirs.n_bytes,
            )
            assert np.array_equal(model.data(ours.name).reshape(-1), theirs.data.view(np.uint8).reshape(-1))
            expected = quants.dequantize(theirs.data, theirs.tensor_type).reshape(ours.shape)
            assert np.array_equal(model.dequantize(ours.name), expected)
        assert model.parameter_count == sum(int(theirs.n_elements) for theirs in reader.tensors)
        assert model.size_bytes == (data_dir / name).stat().st_size


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2"])
def test_a_large_vocabulary_is_not_decoded_until_asked(name: str, data_dir: Path) -> None:
    with open_model(data_dir / "vocab" / f"ggml-vocab-{name}.gguf") as model:
        tokens, merges = model.metadata["tokenizer.ggml.tokens"], model.metadata["tokenizer.ggml.merges"]
        assert isinstance(tokens, MetadataArray)
        assert isinstance(merges, MetadataArray)
        assert len(tokens) == len(model.metadata["tokenizer.ggml.token_type"]) > 128_000  # type: ignore[arg-type]
        assert "_items" not in vars(tokens)
    vocabulary = set(tokens)  # after closing: it owns its bytes
    assert len(vocabulary) == len(tokens)
    assert all(set(merge.split(" ")) <= vocabulary for merge in merges)  # type: ignore[union-attr]


def test_version_2_and_the_name_from_the_path(tmp_path: Path) -> None:
    path = tmp_path / "tiny.Q8_0.gguf"
    path.write_bytes(gguf_file([text("general.architecture", "llama")], version=2))
    with open_model(str(path)) as model:
        assert (model.version, model.name, model.architecture, model.paths) == (2, "tiny.Q8_0", "llama", (path,))
        assert (model.parameter_count, dict(model.tensors)) == (0, {})


def test_missing_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file())
    with open_model(path) as model, pytest.raises(ModelFileError, match=r"x.gguf: general.architecture: is missing"):
        _ = model.architecture


def test_data_is_read_by_rows(small: Path) -> None:
    with open_model(small) as model:
        rows = model.data("w1")
        assert (rows.shape, rows.dtype) == ((5 * 64, 128), np.uint8)
        values = model.dequantize("w1")
        assert values.shape == (5, 64, 32)
        buffer = np.empty(7 * 128 + SLACK_BYTES, np.uint8)
        some = model.data("w1", 300, 7, buffer)
        assert np.array_equal(some, rows[300:307]) and some.base is buffer
        for first, count in ((-1, 1), (0, 321), (320, 1), (5, -1)):
            with pytest.raises(IndexError, match="w1 has 320 rows"):
                model.data("w1", first, count)
        with pytest.raises(KeyError):
            model.data("absent")
    assert np.array_equal(rows.view(np.float32).reshape(5, 64, 32), values)  # they no longer need the file
    with pytest.raises(ValueError, match=r"small.gguf is closed"):
        model.data("w1")
    model.close()


def test_split_model_opens_from_any_part(split: tuple[list[Path], dict[str, np.ndarray[Any, Any]]]) -> None:
    paths, tensors = split
    for path in paths:
        with open_model(path) as model:
            assert model.paths == tuple(paths)
            assert model.path == paths[0]
            assert (model.name, model.size_bytes) == ("Small", sum(part.stat().st_size for part in paths))
            assert [info.part for info in model.tensors.values()] == [0, 0, 1, 1, 2]
            assert all(np.array_equal(model.dequantize(name), values) for name, values in tensors.items())
    assert not open_files(paths)


def open_files(paths: list[Path]) -> list[Path]:
    if sys.platform == "win32":
        return []  # a process cannot list its own there
    links = (Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd"))
    return [link.readlink() for link in links if link.is_symlink() and link.readlink() in paths]


def test_split_model_with_a_part_missing_swapped_or_renamed(
    split: tuple[list[Path], dict[str, np.ndarray[Any, Any]]], tmp_path: Path
) -> None:
    paths, _ = split
    renamed = tmp_path / "renamed.gguf"
    shutil.copy(paths[0], renamed)
    with pytest.raises(ModelFileError, match=r"renamed.gguf: split.count: .* renamed-00001-of-00003.gguf"):
        open_model(renamed)
    kept = paths[1].read_bytes()
    shutil.copy(paths[2], paths[1])
    with pytest.raises(ModelFileError, match=r"00002-of-00003.gguf: split.no: is 2, outside 1..1"):
        open_model(paths[0])
    paths[1].unlink()
    with pytest.raises(ModelFileError, match=r"00002-of-00003.gguf: cannot be opened: .+[^.]\. Check the path\.$"):
        open_model(paths[0])
    paths[1].write_bytes(kept.replace(b"w2", b"w0"))
    with pytest.raises(ModelFileError, match="tensors: w0 occurs in more than one part"):
        open_model(paths[0])
    assert not open_files(paths)


@pytest.mark.parametrize(
    ("part", "key", "old", "new"),
    [
        (0, b"split.tensors.count", struct.pack("<Ii", 5, 5), struct.pack("<Ii", 5, 6)),
        (1, b"split.count", struct.pack("<IH", 2, 3), struct.pack("<IH", 2, 4)),
    ],
)
def test_split_parts_that_disagree(
    split: tuple[list[Path], dict[str, np.ndarray[Any, Any]]], part: int, key: bytes, old: bytes, new: bytes
) -> None:
    paths, _ = split
    content = paths[part].read_bytes()
    assert content.count(key + old) == 1
    paths[part].write_bytes(content.replace(key + old, key + new))
    with pytest.raises(ModelFileError, match=rf"{paths[part].name}: {key.decode()}: is {new[4]}, outside"):
        open_model(paths[0])


def test_a_file_truncated_or_overwritten_while_open(small: Path) -> None:
    with open_model(small) as model:
        os.truncate(small, 4096)
        for read in (model.data, model.dequantize):
            with pytest.raises(ModelFileError, match=r"small.gguf: the file was changed while it was open"):
                read("w2")
        with pytest.raises(ModelFileError, match="was changed while it was open"):
            model.identity()


def test_overwriting_in_place_is_noticed(small: Path) -> None:
    with open_model(small) as model, small.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\xff" * 8)
        file.flush()
        os.utime(small, ns=(0, 0))  # file timestamps are coarser than this test's run time
        with pytest.raises(ModelFileError, match="was changed while it was open"):
            model.data("w0")


@pytest.mark.skipif(ON_WINE, reason="Wine 8 does not replace an open file, nor free its name at once")
def test_replacing_or_deleting_the_path_is_harmless(small: Path, tmp_path: Path) -> None:
    with open_model(small) as model:
        before = model.dequantize("w2")
        other = tmp_path / "other.gguf"
        other.write_bytes(gguf_file(tensors=[tensor("a", [4])], data=bytes(16)))
        replace(other, small)
        assert np.array_equal(model.dequantize("w2"), before)
        small.unlink()
        assert np.array_equal(model.dequantize("w2"), before)


def test_identity_follows_the_content_not_the_path(small: Path, tmp_path: Path) -> None:
    def identity(path: Path) -> str:
        with open_model(path) as model:
            return model.identity()

    first = identity(small)
    copy = tmp_path / "copy.gguf"
    shutil.copy(small, copy)
    assert identity(copy) == first
    content = small.read_bytes()
    copy.write_bytes(content.replace(b"Small", b"Smell"))
    assert identity(copy) != first
    copy.write_bytes(content + b"\0")
    assert identity(copy) != first
    with open_model(small) as model:
        infos = list(model.tensors.values())
    for info in infos:
        start = info.offset + (info.nbytes - 1024) // 3
        copy.write_bytes(content[:start] + b"\x55" * 1024 + content[start + 1024 :])
        assert identity(copy) != first


def test_identities_of_real_files_differ(data_dir: Path) -> None:
    paths = sorted((data_dir / "models").glob("*/*.gguf"))
    identities = set()
    for path in paths:
        with open_model(path) as model:
            identities.add(model.identity())
    assert len(identities) == len(paths) > 10


CUTTER = """
import os, sys, threading, time
from gguf_io import open_model
from gguf_io.errors import ModelFileError

path, whole = sys.argv[1], open(sys.argv[1], "rb").read()

def cut():
    while True:
        os.truncate(path, 4096)
        with open(path, "r+b") as file:
            file.write(whole)
        time.sleep(0.05)  # where reading is slow, it must end between two cuts

threading.Thread(target=cut, daemon=True).start()
outcomes = set()
while outcomes != {"read", "refused"}:
    try:
        with open_model(path) as model:
            for name in model.tensors:
                model.dequantize(name)
        outcomes.add("read")
    except ModelFileError:
        outcomes.add("refused")
print("alive")
"""


def test_a_file_that_is_cut_again_and_again_is_an_error_and_no_signal(small: Path) -> None:
    command = [sys.executable, "-c", CUTTER, str(small)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_nothing_is_mapped(small: Path) -> None:
    with open_model(small) as model:
        model.dequantize("w0")
        assert str(small) not in Path("/proc/self/maps").read_text()


def test_opening_imports_neither_tokenizers_nor_templates_nor_gguf(small: Path) -> None:
    code = (
        "import sys, gguf_io; gguf_io.open_model(sys.argv[1]).dequantize('w0');"
        "print(sorted({'tokenizers', 'jinja2', 'sentencepiece', 'gguf', 'numba'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(small)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_package_names_what_it_exports() -> None:
    import gguf_io

    assert gguf_io.ModelFile is ModelFile
    assert gguf_io.BLOCK_TYPES is BLOCK_TYPES
    with pytest.raises(AttributeError, match="no attribute 'open_modle'"):
        _ = gguf_io.open_modle  # type: ignore[attr-defined]
