"""What people take for a GGUF model is recognised, and they are told what to do with it."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from gguf_io import open_model
from gguf_io.errors import ModelFileError
from localllm.cli.run import _thought
from localllm.errors import RequestError
from localllm.files import read_text
from localllm.front.prompt import read_format
from tests.closed_folders import closed


def zipped(name: str) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr(name, b"\0" * 100)
    return held.getvalue()


def tarred() -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        entry = tarfile.TarInfo("model.gguf")
        entry.size = 100
        archive.addfile(entry, io.BytesIO(bytes(100)))
    return held.getvalue()


def safetensors() -> bytes:
    header = json.dumps({"w": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0\0"


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
FILES = {
    "empty": (b"", "it is empty. Download it again"),
    "zeros": (bytes(4096), "beginning was never written. Download it again"),
    "pointer": (POINTER, "a Git LFS pointer"),
    "page": (b"\n<!DOCTYPE html>\n<html lang='en'>", "it is a web page. Download the file itself"),
    "page after a mark": (b"\xef\xbb\xbf<HTML>", "it is a web page"),
    "xml": (b'<?xml version="1.0"?><Error/>', "it is a web page"),
    "zip": (zipped("model.gguf"), "a ZIP archive. Unpack it"),
    "checkpoint": (zipped("archive/data.pkl"), "a PyTorch checkpoint"),
    "pickle": (pickle.dumps({"a": 1}, protocol=2), "a PyTorch checkpoint"),
    "tar": (tarred(), "a tar archive. Unpack it"),
    "gzip": (gzip.compress(b"GGUF"), "a gzip archive. Unpack it"),
    "xz": (lzma.compress(b"GGUF"), "an xz archive"),
    "bzip2": (bz2.compress(b"GGUF"), "a bzip2 archive"),
    "ggml": (struct.pack("<I", 0x67676D6C) + bytes(60), "in the format ggml, older than GGUF"),
    "ggjt": (struct.pack("<II", 0x67676A74, 3) + bytes(60), "in the format ggjt, older than GGUF"),
    "safetensors": (safetensors(), "a safetensors file. localllm create NAME --from FOLDER"),
    "json": (b'{"error": "Repository not found"}', "it is JSON"),
    "text": ("Zugriff verweigert: Schlüssel fehlt\n".encode(), "it is text"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(60), "an HDF5 file. Use the model's GGUF version"),
    "llamafile": (b"MZqFpD='\n" + bytes(60), "a llamafile. It has the model inside"),
    "pdf": (b"%PDF-1.7\n", "a PDF document. Choose a .gguf model"),
    "jpeg": (b"\xff\xd8\xff\xe0" + bytes(60), "a picture"),
    "noise": (b"\x13\x37\xff\xfe" * 20, "it starts with 13 37 ff fe"),
    "cut": (b"GGUF\3\0\0\0", "ends after 8 bytes. The file is damaged"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0) + bytes(60), "big-endian"),
    "reversed": (b"FUGG" + bytes(60), "big-endian"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, name: str) -> None:
    data, words = FILES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as refused:
        open_model(path)
    assert words in str(refused.value)
    assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["zip", "gzip", "hdf5", "jpeg", "model"])
def test_where_text_is_wanted(tmp_path: Path, name: str) -> None:
    data = FILES[name][0] if name in FILES else b"GGUF\3\0\0\0\xff"
    (tmp_path / "Modelfile").write_bytes(data + b"\xff")
    with pytest.raises(RequestError, match=r"Modelfile: is not text: it is a.*\. Choose another file\."):
        read_text(tmp_path / "Modelfile")


def test_folders(tmp_path: Path) -> None:
    def said() -> str:
        with pytest.raises(ModelFileError) as refused:
            open_model(tmp_path)
        return str(refused.value)

    assert "it is a folder without a .gguf file" in said()
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    assert f"a folder of safetensors. localllm create NAME --from {tmp_path} converts it" in said()
    for name in ("b.gguf", "A.GGUF"):
        (tmp_path / name).touch()
    assert "it is a folder. Choose a model in it: A.GGUF, b.gguf." in said()
    with closed(tmp_path):
        assert "Permission denied" in said()


@pytest.mark.parametrize("text", ["yaml", "JSON", "text"])
def test_formats_that_are_none(text: str) -> None:
    with pytest.raises(RequestError, match="is neither json, nor a JSON Schema, nor a file with one"):
        read_format(text)


@pytest.mark.parametrize("text", ["yes", "true", "1", "lowish"])
def test_invalid_thinking_options_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="use on, off, or an effort: none, minimal, low"):
        _thought(text)
    assert (_thought("on"), _thought("off"), _thought("low"), _thought(None)) == (True, False, "low", None)
