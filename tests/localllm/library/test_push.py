"""Pushing a model of our own store to a registry of Ollama's protocol."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.library.errors import ModelNotFoundError, PushError
from localllm.library.lookup import find
from localllm.library.names import ModelName
from localllm.library.pull import PullStatus
from localllm.library.push import push
from localllm.settings import Settings
from tests.localllm.library.conftest import write_file
from tests.localllm.library.model_server import ModelServer
from tests.localllm.library.push_registry import PushRegistry

SETTINGS = Settings()
STORE = "localllm/models"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushRegistry]:
    monkeypatch.setattr("localllm.library.web.LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr("localllm.library.push.CHUNK_BYTES", 4096)
    with PushRegistry().running() as running:
        yield running


@pytest.fixture
def name(home: Path, registry: PushRegistry, tiny_gguf: bytes, command: Callable[..., int]) -> ModelName:
    """A created model, under a name at the registry."""
    write_file(home / "tiny.gguf", tiny_gguf)
    write_file(home / "Modelfile", b"FROM ./tiny.gguf\nSYSTEM Be kind.\nPARAMETER top_k 5\nLICENSE MIT")
    assert command("create", f"{registry.host}/me/mine", "-f", "Modelfile") == 0
    return ModelName.parse(f"{registry.host}/me/mine")


def pushed(name: ModelName) -> list[PullStatus]:
    told: list[PullStatus] = []
    push(name, SETTINGS, told.append)
    return told


def refusing(method: str, part: str, status: int, message: str = "no", times: int = 99) -> Callable[..., object]:
    left = [times]

    def fault(asked: str, path: str) -> tuple[int, str] | None:
        if asked != method or part not in path or not left[0]:
            return None
        left[0] -= 1
        return status, message

    return fault


def test_what_was_created_arrives_whole(registry: PushRegistry, name: ModelName, tiny_gguf: bytes) -> None:
    told = pushed(name)
    assert registry.of_kind("me/mine:latest") == {
        "model": tiny_gguf, "system": b"Be kind.", "params": b'{"top_k": 5}', "license": b"MIT",
    }  # fmt: skip
    config = json.loads(registry.blobs[json.loads(registry.manifests["me/mine:latest"])["config"]["digest"]])
    assert (config["model_format"], config["model_family"], config["file_type"]) == ("gguf", "llama", "Q8_0")
    assert registry.requests[-1][0] == "PUT" and "/manifests/" in registry.requests[-1][1]
    assert told[0].status == "retrieving manifest"
    assert [status.status for status in told][-2:] == ["pushing manifest", "success"]
    model = next(status for status in told if status.total == len(tiny_gguf))
    assert model.status == f"pushing {str(model.digest)[7:19]}"
    assert any(status.completed == status.total == len(tiny_gguf) for status in told)


def test_it_can_be_pulled_again(
    registry: PushRegistry, name: ModelName, tiny_gguf: bytes, server: ModelServer, command: Callable[..., int]
) -> None:
    pushed(name)
    server.routes["/v2/me/mine/manifests/latest"] = registry.manifests["me/mine:latest"]
    server.routes |= {f"/v2/me/mine/blobs/{digest}": data for digest, data in registry.blobs.items()}
    assert command("pull", f"{server.host}/me/mine") == 0
    model = find(f"{server.host}/me/mine", SETTINGS)
    assert (model.path.read_bytes(), model.defaults().system) == (tiny_gguf, "Be kind.")


def test_what_has_arrived_is_not_sent_again(
    registry: PushRegistry, name: ModelName, command: Callable[..., int]
) -> None:
    registry.faults.append(refusing("PUT", "/manifests/", 507, "no space left", 1))
    with pytest.raises(PushError, match=r"507 .*no space left"):
        pushed(name)
    assert registry.manifests == {}
    sent = registry.sent("PATCH")
    assert command("push", str(name)) == 0
    assert registry.sent("PATCH") == sent
    assert "me/mine:latest" in registry.manifests


def test_a_broken_connection_resumes_within_the_file(
    registry: PushRegistry, name: ModelName, tiny_gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.library.push.CHUNK_BYTES", 1000)
    breaks = iter([None, "cut", None, None, "cut"])
    registry.faults.append(lambda method, path: next(breaks, None) if method == "PATCH" else None)
    pushed(name)
    assert registry.of_kind("me/mine:latest")["model"] == tiny_gguf
    assert registry.sent("GET", "/uploads/") == 2
    assert registry.sent("POST", "/uploads/") == len(registry.blobs)  # none was begun anew


def test_an_upload_that_is_lost_begins_anew(registry: PushRegistry, name: ModelName, tiny_gguf: bytes) -> None:
    registry.faults.append(refusing("PATCH", "", 503, "busy", 1))
    registry.faults.append(refusing("GET", "/uploads/", 404, "gone", 1))
    pushed(name)
    assert registry.of_kind("me/mine:latest")["model"] == tiny_gguf


@pytest.mark.parametrize(
    ("method", "part", "status", "message", "words"),
    [
        ("HEAD", "/blobs/", 401, "", "requires a login"),
        ("POST", "/uploads/", 401, "authentication required", "requires a login.*: authentication required"),
        ("POST", "/uploads/", 403, "denied", "requires a login.*denied"),
        (
            "POST",
            "/uploads/",
            404,
            "repository name not known",
            "an upload with 404 Not Found: repository name",
        ),
        ("PUT", "/uploads/", 400, "provided digest did not match", "another content than the digest says"),
        ("PATCH", "/uploads/", 507, "disk full", "refuses a chunk with 507 .*: disk full"),
        ("PATCH", "/uploads/", 503, "busy", "answers 503 to a chunk: busy.* Push again"),
        ("PUT", "/manifests/", 413, "too large", "refuses the manifest with 413"),
    ],
)
def test_refusals(
    registry: PushRegistry, name: ModelName, method: str, part: str, status: int, message: str, words: str
) -> None:
    registry.faults.append(refusing(method, part, status, message))
    with pytest.raises(PushError, match=words):
        pushed(name)
    assert registry.manifests == {}


def test_an_upload_to_an_invalid_address(
    registry: PushRegistry, name: ModelName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_upload", lambda *_: (202, {"Location": "http://a:b/"}, b""))
    with pytest.raises(PushError, match="sends the upload to an invalid address: Invalid port: 'b'"):
        pushed(name)


def test_a_push_that_is_stopped(registry: PushRegistry, name: ModelName) -> None:
    def stop(status: PullStatus) -> None:
        if status.digest:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push(name, SETTINGS, stop)
    assert registry.manifests == {}
    pushed(name)
    assert registry.manifests


def test_what_cannot_be_pushed(
    home: Path, name: ModelName, registry: PushRegistry, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelNotFoundError):
        pushed(ModelName.parse("nothing"))
    assert command("cp", str(name), "mine") == 0
    assert command("push", "mine") == 2
    assert "only after a login" in capsys.readouterr().err
    assert command("push", "./tiny.gguf") == 2
    assert "is a path" in capsys.readouterr().err
    (home / "tiny.gguf").unlink()
    assert command("push", str(name)) == 2
    assert "tiny.gguf: cannot be opened" in capsys.readouterr().err
    assert not registry.requests


def test_a_registry_that_does_not_run(home: Path, name: ModelName, command: Callable[..., int]) -> None:
    assert command("cp", str(name), "127.0.0.1:9/me/mine") == 0
    assert command("push", "127.0.0.1:9/me/mine") == 2
