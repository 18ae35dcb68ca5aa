"""A separate home folder for every test, with the stores of other programs in it."""

import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.gguf_files import finish
from tests.localllm.library.model_server import ModelServer
from tests.systems import use_own_places

OTHER_PLACES = (
    "OLLAMA_MODELS",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_HOME",
    "LLAMA_CACHE",
    "HF_ENDPOINT",
    "HF_TOKEN",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home; no variable points outside."""
    folder = tmp_path / "home"
    folder.mkdir()
    use_own_places(folder, monkeypatch)
    for variable in OTHER_PLACES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole model file of a few kilobytes, with the keys of a Llama and the file type Q8_0."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_token_list([f"t{index}" for index in range(40)])
    writer.add_tensor("blk.0.attn_k.weight", np.zeros((16, 32), np.float16))
    writer.add_tensor("token_embd.weight", np.zeros((40, 32), np.float32))
    finish(writer)
    return path.read_bytes()


def write_file(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def write_ollama_model(root: Path, name: str, layers: dict[str, bytes]) -> Path:
    """The files of `ollama pull`: name is host/namespace/model/tag; layers are keyed by the end of their media type."""
    listed = []
    for kind, data in layers.items():
        digest = hashlib.sha256(data).hexdigest()
        write_file(root / "blobs" / f"sha256-{digest}", data)
        media_type = f"application/vnd.ollama.image.{kind}"
        listed.append({"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)})
    manifest = {"schemaVersion": 2, "config": {"digest": "sha256:" + 64 * "0", "size": 1}, "layers": listed}
    return write_file(root / "manifests" / name, json.dumps(manifest).encode())


def write_hugging_face_model(hub: Path, repository: str, file: str, data: bytes, revision: str = "a" * 40) -> Path:
    """The files of huggingface_hub: a blob, and a snapshot that links to it; only a snapshot where it cannot link."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    if sys.platform == "win32":
        return write_file(folder / "snapshots" / revision / file, data)
    blob = write_file(folder / "blobs" / hashlib.sha256(data).hexdigest(), data)
    link = folder / "snapshots" / revision / file
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(Path("../" * (2 + file.count("/"))) / "blobs" / blob.name)
    return link


@pytest.fixture
def full_home(home: Path, tiny_gguf: bytes) -> Path:
    """Models of four other programs."""
    ollama = home / ".ollama" / "models"
    layers = {"model": tiny_gguf, "system": b"Speak like a pirate.", "params": b'{"temperature": 0.5, "stop": ["x"]}'}
    write_ollama_model(ollama, "registry.ollama.ai/library/qwen3/0.6b", layers)
    write_ollama_model(ollama, "hf.co/bartowski/Tiny-GGUF/Q8_0", {"model": tiny_gguf})
    hub = home / "huggingface" / "hub"
    write_hugging_face_model(hub, "user/Some-Model-GGUF", "Some-Model-Q4_K_M.gguf", tiny_gguf)
    write_hugging_face_model(hub, "user/Some-Model-GGUF", "Some-Model-Q8_0.gguf", tiny_gguf)
    write_hugging_face_model(hub, "user/Some-Model-GGUF", "mmproj-Some-Model-F16.gguf", tiny_gguf)
    write_file(home / ".lmstudio/models/lmstudio-community/Phi-GGUF/Phi-Q6_K.gguf", tiny_gguf)
    write_file(home / "llama.cpp/ggml-org_gemma-GGUF_gemma-Q4_0.gguf", tiny_gguf)
    write_file(home / "llama.cpp/manifest=ggml-org=gemma-GGUF=latest.json", b"{}")
    return home


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run localllm with these arguments and return the exit code."""
    from localllm.cli.main import main

    def call(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["localllm", *arguments])
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return call


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    """A model server, which HF_ENDPOINT also points to; retry waits and chunks are small."""
    monkeypatch.setattr("localllm.library.partial.CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr("localllm.library.web.LONGEST_WAIT_S", 0.02)
    with ModelServer().running() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.fixture(scope="session")
def big_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model file of some megabytes of random weights, which has many chunks."""
    path = tmp_path_factory.mktemp("big") / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("big")
    writer.add_tensor("token_embd.weight", np.random.default_rng(1).random((1500, 512), np.float32))
    finish(writer)
    return path.read_bytes()
