"""Progress of a model's load, and a server that is stopped during it."""

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.localllm.server.conftest import MODEL, StartServer
from tests.systems import STOP
from tests.waiting import PATIENCE_S, eventually

BODY = {"model": MODEL, "prompt": "Hi", "progress": True, "options": {"num_predict": 2}}
MESSAGES = [{"role": "user", "content": "Hi"}]


def lines(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", url + path, json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        data = [line.removeprefix("data: ") for line in answer.iter_lines()]
        return [json.loads(line) for line in data if line.startswith("{")]


def in_memory(url: str) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = httpx.get(url + "/api/ps", timeout=PATIENCE_S).json()["models"]
    return models


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", BODY),
        ("/api/generate", {"model": MODEL, "progress": True}),
        ("/api/chat", {"model": MODEL, "messages": MESSAGES, "progress": True, "options": {"num_predict": 2}}),
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "progress": True, "stream": True}),
        ("/v1/completions", {**BODY, "stream": True, "max_tokens": 2}),
        ("/v1/responses", {"model": MODEL, "progress": True, "stream": True, "input": "Hi", "max_output_tokens": 2}),
        ("/v1/messages", {**BODY, "stream": True, "messages": MESSAGES, "max_tokens": 2}),
    ],
)
def test_loading_is_reported(server: Any, path: str, body: dict[str, Any]) -> None:
    httpx.post(server.url + "/api/generate", json={"model": MODEL, "keep_alive": 0}, timeout=PATIENCE_S)
    eventually(lambda: MODEL not in [model["name"] for model in in_memory(server.url)])
    told = [line["progress"] for line in lines(server.url, path, body) if "progress" in line]
    loads = [progress for progress in told if "phase" in progress]
    assert loads[0]["phase"] == "loading weights" and all(0 <= progress["share"] <= 1 for progress in loads)
    again = [line.get("progress", {}) for line in lines(server.url, path, body)]
    assert any(again) or (not body.get("options") and not body.get("stream"))
    assert not any("phase" in progress for progress in again)


def test_what_fails_behind_the_first_line_is_a_line(
    start_server: StartServer, model_files: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    whole = (model_files / f"{MODEL}.gguf").read_bytes()
    broken.write_bytes(whole)
    with start_server("--model", str(broken)) as server:
        broken.write_bytes(whole[:-20_000])
        answer = httpx.post(server.url + "/api/generate", json={**BODY, "model": "broken"}, timeout=PATIENCE_S)
        assert answer.status_code >= 400 or "error" in json.loads(answer.text.splitlines()[-1])


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_load(start_server: StartServer, tmp_path: Path) -> None:
    # Without compiled kernels a load takes a minute or more.
    with start_server(LOCALLLM_KERNEL_CACHE=str(tmp_path / "kernels"), LOCALLLM_GRACE_S="600") as server:
        answers: list[httpx.Response] = []

        def ask() -> None:
            body = {**BODY, "progress": False, "stream": False}
            answers.append(httpx.post(server.url + "/api/generate", json=body, timeout=PATIENCE_S))

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: [model for model in in_memory(server.url) if model.get("loading")])
        assert httpx.get(server.url + "/health", timeout=PATIENCE_S).json()["models_loading"] == 1
        server.process.send_signal(STOP)
        server.process.wait()
        asking.join()
        assert answers[0].status_code == 503 and "shutting down" in answers[0].json()["error"]
