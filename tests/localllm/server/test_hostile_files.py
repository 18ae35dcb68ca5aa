"""Uploaded hostile files, decompression bombs, files that change while in use, a killed server."""

import base64
import hashlib
import os
import pickle
import shutil
import socket
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import PATIENCE_S, eventually

MODEL = "stories260K-Q8_0"
GREEDY = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "stream": False,
    "options": {"temperature": 0, "num_predict": 8},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def library(start_server: Any, store: Path) -> Iterator[Any]:
    with start_server(LOCALLLM_MODEL_STORE=str(store)) as server:
        yield server


def archive() -> bytes:
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("../../../evil.gguf", b"GGUF")
    return packed.getvalue()


def header(tensors: int, fields: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + rest


def beyond_the_end(whole: bytes) -> bytes:
    """A real file without its last tensor's data."""
    return whole[:-4096]


@pytest.mark.parametrize(
    "made",
    [
        lambda _whole: archive(),
        lambda _whole: pickle.dumps({"weights": [1.0]}),
        lambda _whole: b"\x1f\x8b" + bytes(100),
        lambda _whole: header(2**62, 2**62),
        lambda _whole: header(0, 1, struct.pack("<Q", 2**63) + b"x"),
        lambda _whole: header(1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<I", 2**31)),
        beyond_the_end,
        lambda whole: whole.replace(b"llama.block_count", b"llama.bl0ck_count"),
    ],
    ids=["archive", "pickle", "gzip", "counts", "key", "dimensions", "range", "no-layers"],
)
def test_broken_uploads_are_refused_and_leave_no_name(library: Any, store: Path, model_files: Path, made: Any) -> None:
    data = made((model_files / f"{MODEL}.gguf").read_bytes())
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    assert httpx.post(f"{library.url}/api/blobs/{digest}", content=data, timeout=PATIENCE_S).status_code == 201
    body = {"model": "evil", "files": {"model.gguf": digest}, "stream": False}
    answer = httpx.post(f"{library.url}/api/create", json=body, timeout=PATIENCE_S)
    if answer.status_code == 200:  # what only loading detects
        answer = httpx.post(f"{library.url}/api/generate", json={**GREEDY, "model": "evil"}, timeout=PATIENCE_S)
        httpx.request("DELETE", f"{library.url}/api/delete", json={"model": "evil"}, timeout=PATIENCE_S)
    assert 400 <= answer.status_code <= 500 and len(answer.json()["error"]) > 20, answer.text
    assert "localllm; its log" not in answer.text  # reported by name, not as a bug
    assert not list((store / "manifests").rglob("evil*/*"))
    assert httpx.post(f"{library.url}/api/generate", json=GREEDY, timeout=PATIENCE_S).status_code == 200


def bomb() -> str:
    """A small PNG whose rows decompress to some hundred megabytes, as its header says."""
    width, height = 4096, 4096

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 16, 6, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = bytes(1 + width * 8)
    rows = b"".join([packer.compress(row * 64) for _ in range(height // 64)]) + packer.flush()
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()


@pytest.mark.slow
def test_decompression_bombs_do_not_delay_others(server: Any) -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{bomb()}"}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [part] * 4}], "max_tokens": 1}
    assert httpx.post(f"{server.url}/api/generate", json=GREEDY, timeout=PATIENCE_S).status_code == 200  # it is loaded
    answers: list[httpx.Response] = []
    path = f"{server.url}/v1/chat/completions"
    asking = threading.Thread(target=lambda: answers.append(httpx.post(path, json=body, timeout=PATIENCE_S)))
    asking.start()
    meanwhile = 0
    while asking.is_alive():
        assert httpx.get(server.url + "/health", timeout=PATIENCE_S).status_code == 200
        meanwhile += 1
    asking.join()
    assert meanwhile > 4
    assert answers[0].status_code == 400  # this model has no vision


@pytest.mark.parametrize("change", ["overwritten", "truncated", "replaced", "removed"])
def test_a_file_that_changes_under_a_loaded_model_changes_no_answer(
    start_server: Any, model_files: Path, tmp_path: Path, change: str
) -> None:
    path = tmp_path / f"{MODEL}.gguf"
    shutil.copyfile(model_files / path.name, path)
    with start_server("--model", str(path), models=()) as server:
        before = httpx.post(f"{server.url}/api/generate", json=GREEDY, timeout=PATIENCE_S).json()["response"]
        if change == "overwritten":
            path.write_bytes(bytes(path.stat().st_size))
        elif change == "truncated":
            os.truncate(path, 5000)
        elif change == "removed":
            path.unlink()
        else:
            shutil.copyfile(model_files / "tinystories656K-Q8_0.gguf", tmp_path / "other")
            (tmp_path / "other").rename(path)
        answer = httpx.post(f"{server.url}/api/generate", json=GREEDY, timeout=PATIENCE_S)
        assert before and answer.json().get("response") == before
        for route in ("/api/tags", "/api/ps", "/health"):
            assert httpx.get(server.url + route, timeout=PATIENCE_S).status_code == 200
        assert server.process.poll() is None


def test_a_server_that_is_killed_while_it_takes_a_file_keeps_what_it_had(start_server: Any, tmp_path: Path) -> None:
    whole = hashlib.sha256(b"whole").hexdigest()
    large = bytes(2**20)
    cut = hashlib.sha256(large).hexdigest()
    with start_server(LOCALLLM_MODEL_STORE=str(tmp_path)) as server:
        assert (
            httpx.post(f"{server.url}/api/blobs/sha256:{whole}", content=b"whole", timeout=PATIENCE_S).status_code
            == 201
        )
        made = {"model": "kept", "from": MODEL, "system": "Be brief.", "stream": False}
        assert httpx.post(f"{server.url}/api/create", json=made, timeout=PATIENCE_S).json() == {"status": "success"}
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = f"POST /api/blobs/sha256:{cut} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(large)}\r\n\r\n"
            connection.sendall(head.encode() + large[: len(large) // 2])
            eventually(lambda: list((tmp_path / "partial").glob(".*.tmp")))
            server.process.kill()
            server.process.wait()
    with start_server(LOCALLLM_MODEL_STORE=str(tmp_path)) as server:
        blobs = f"{server.url}/api/blobs/sha256:"
        assert (
            httpx.head(blobs + whole, timeout=PATIENCE_S).status_code == 200
            and httpx.head(blobs + cut, timeout=PATIENCE_S).status_code == 404
        )
        assert "kept:latest" in {
            model["name"] for model in httpx.get(f"{server.url}/api/tags", timeout=PATIENCE_S).json()["models"]
        }
        assert httpx.post(blobs + cut, content=large, timeout=PATIENCE_S).status_code == 201
