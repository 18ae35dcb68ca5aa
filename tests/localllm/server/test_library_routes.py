"""Blobs, create, copy and delete by the official client, and what they refuse."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import pytest

from localllm.server.ollama.models import tags
from localllm.server.served import ServedRow
from tests.localllm.library.push_registry import PushRegistry
from tests.waiting import PATIENCE_S

MODEL = "stories260K-Q8_0"


@pytest.fixture(scope="module")
def library(start_server: Any) -> Iterator[Any]:
    with start_server() as server:
        yield server


@pytest.fixture
def client(library: Any) -> Iterator[ollama.Client]:
    with ollama.Client(host=library.url) as client:
        yield client


def names(client: ollama.Client) -> set[str | None]:
    return {model.model for model in client.list().models}


def test_upload_create_use_copy_delete(client: ollama.Client, model_files: Path) -> None:
    digest = client.create_blob(model_files / "tinystories656K-Q8_0.gguf")
    told = list(client.create("mine", files={"model.gguf": digest}, parameters={"num_predict": 3}, stream=True))
    assert told[-1].status == "success"
    assert "mine:latest" in names(client)
    answer = client.generate("mine", "Once upon a time", options={"temperature": 0})
    assert answer.eval_count == 3  # the parameter applies if the request sets none
    assert client.generate("mine", "Once", options={"temperature": 0, "num_predict": 5}).eval_count == 5
    client.copy("mine", "yours:small")
    client.delete("mine")
    assert "mine:latest" not in names(client) and "yours:small" in names(client)
    assert client.generate("yours:small", "Once upon a time", options={"temperature": 0}).response == answer.response
    client.delete("yours:small")
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete("yours:small")
    assert caught.value.status_code == 404


def test_push_tells_its_progress_as_lines(library: Any, client: ollama.Client) -> None:
    with PushRegistry().running() as registry:
        name = f"{registry.host}/me/mine"
        client.create(name, from_="builtin", system="Be kind.")
        told = list(client.push(name, stream=True))
        assert [told[0].status, *(line.status for line in told[-2:])] == [
            "retrieving manifest",
            "pushing manifest",
            "success",
        ]
        sizes = {line.digest: line.total for line in told if line.digest}
        assert sizes == {digest: len(data) for digest, data in registry.blobs.items()}
        assert all(line.status == f"pushing {line.digest[7:19]}" for line in told if line.digest)
        assert registry.of_kind("me/mine:latest")["system"] == b"Be kind."
        assert client.push(name).status == "success"
        registry.faults.append(lambda method, _path: (401, "who are you") if method == "HEAD" else None)
        lines = httpx.post(f"{library.url}/api/push", json={"model": name}, timeout=PATIENCE_S).text.splitlines()
        assert "requires a login" in json.loads(lines[-1])["error"]
        client.delete(name)
    for body, status in (({"model": name}, 404), ({"model": "../x"}, 400), ({}, 400)):
        assert httpx.post(f"{library.url}/api/push", json=body).status_code == status


def test_system_text_of_a_model_is_used(client: ollama.Client) -> None:
    client.create("narrator", from_=MODEL, system="You tell of the sea and of ships and of storms.")
    messages = [{"role": "user", "content": "Hi"}]
    options = {"num_predict": 1}
    plain = client.chat(MODEL, messages, options=options).prompt_eval_count or 0
    with_system = client.chat("narrator", messages, options=options).prompt_eval_count or 0
    assert with_system > plain + 10
    own = [{"role": "system", "content": "x"}, *messages]
    assert (client.chat("narrator", own, options=options).prompt_eval_count or 0) < with_system


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:../../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "sha256:" + "A" * 64,
        "sha256-" + "0" * 64,
        "sha256:" + "0" * 63,
    ],
)
def test_digests_are_checked_before_any_path(library: Any, digest: str) -> None:
    for method in ("HEAD", "POST"):
        assert httpx.request(
            method, f"{library.url}/api/blobs/{digest}", content=b"x", timeout=PATIENCE_S
        ).status_code in (400, 404)


def test_blobs_must_have_their_digest(library: Any) -> None:
    right = hashlib.sha256(b"hello").hexdigest()
    url = f"{library.url}/api/blobs/sha256:"
    assert httpx.head(url + right, timeout=PATIENCE_S).status_code == 404
    assert httpx.post(url + "0" * 64, content=b"hello", timeout=PATIENCE_S).status_code == 400
    assert httpx.head(url + "0" * 64, timeout=PATIENCE_S).status_code == 404
    assert httpx.post(url + right, content=b"hello", timeout=PATIENCE_S).status_code == 201
    assert httpx.post(url + right, content=b"hello", timeout=PATIENCE_S).status_code == 200
    assert httpx.head(url + right, timeout=PATIENCE_S).status_code == 200
    made = httpx.post(
        f"{library.url}/api/create",
        json={"model": "bad", "files": {"x": f"sha256:{right}"}, "stream": False},
        timeout=PATIENCE_S,
    )
    assert made.status_code >= 400 and "GGUF" in made.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/create", {"model": "../x", "from": MODEL}, 400),
        ("/api/create", {"model": "x", "from": "/etc/passwd"}, 400),
        ("/api/create", {"model": "x", "files": {"a": "sha256:../../x"}}, 400),
        ("/api/create", {"model": "x", "files": {"../../a": "sha256:" + "0" * 64}}, 400),
        ("/api/create", {"model": "x"}, 400),
        ("/api/create", {"model": "x", "from": MODEL, "quantize": "q9_9"}, 400),
        ("/api/create", {"model": "x", "from": MODEL, "parameters": {"num_gup": 1}}, 400),
        ("/api/create", {"model": "x", "from": "nobody"}, 404),
        ("/api/copy", {"source": "nobody", "destination": "x"}, 404),
        ("/api/copy", {"source": MODEL, "destination": "../../x"}, 400),
        ("/api/pull", {"model": "http://127.0.0.1:1/x.gguf"}, 400),
        ("/api/pull", {"model": "127.0.0.1:1/a/b"}, 400),
        ("/api/push", {"model": MODEL}, 404),
    ],
)
def test_refusals(library: Any, path: str, body: dict[str, Any], status: int) -> None:
    answer = httpx.post(library.url + path, json=body, timeout=PATIENCE_S)
    assert answer.status_code == status and answer.json()["error"]


def test_deleting_what_others_own(library: Any) -> None:
    answer = httpx.request("DELETE", f"{library.url}/api/delete", json={"model": MODEL}, timeout=PATIENCE_S)
    assert answer.status_code == 404


@pytest.mark.parametrize("params", [b'{"stop": 5}', b"[" * 100_000, b'{"temperature": {}}', b"\xff"])
def test_one_bad_manifest_hides_no_other_model(start_server: Any, tmp_path: Path, params: bytes) -> None:
    with start_server(LOCALLLM_MODEL_STORE=str(tmp_path)) as server, ollama.Client(host=server.url) as client:
        for name in ("good", "bad"):
            client.create(name, from_=MODEL, parameters={"num_predict": len(name)})
        digest = f"sha256:{hashlib.sha256(params).hexdigest()}"
        (tmp_path / "blobs" / digest.replace(":", "-")).write_bytes(params)
        (path,) = (file for file in (tmp_path / "manifests").rglob("*") if file.is_file() and "bad" in file.parts)
        manifest = json.loads(path.read_text(encoding="utf-8"))
        for layer in manifest["layers"]:
            if layer["mediaType"].endswith("params"):
                layer |= {"digest": digest, "size": len(params)}
        path.write_text(json.dumps(manifest), encoding="utf-8")
        assert {"good:latest", f"{MODEL}"} <= names(client)
        rows = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["data"]
        assert {"good:latest", MODEL} <= {row["id"] for row in rows}
        assert client.generate("good", "Once").eval_count == 4


def test_a_file_that_disappears_while_it_is_listed_breaks_no_list() -> None:
    def gone(_entry: object) -> list[str]:
        raise FileNotFoundError("m.gguf")

    listed = [(SimpleNamespace(capabilities=gone), None, ServedRow("m", 0, "", "0" * 64))]
    service: Any = SimpleNamespace(listed=lambda: listed)
    (row,) = asyncio.run(tags(service))["models"]
    assert row["name"] == "m" and "capabilities" not in row
