"""Clients that disconnect or do not read, and server shutdown."""

import json
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.localllm.server.conftest import SLOWLY, Server, StartServer
from tests.systems import STOP
from tests.waiting import PATIENCE_S, eventually

MODEL = "stories260K-Q8_0"
# Rolls its window and continues for ten contexts: the server has to be stopped.
ENDLESS = {"model": MODEL, "prompt": "Once upon a time", "options": {"seed": 1, "num_predict": 5000, "temperature": 0}}


def send(server: Any, body: dict[str, Any], path: str = "/api/generate") -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def busy(server: Any) -> tuple[int, int]:
    """Requests that run or wait."""
    loaded = httpx.get(server.url + "/api/ps", timeout=PATIENCE_S).json()["models"]
    return sum(model.get("running", 0) for model in loaded), sum(model.get("waiting", 0) for model in loaded)


def generated(server: Any) -> int:
    """Tokens generated for requests that have ended."""
    text = httpx.get(server.url + "/metrics", timeout=PATIENCE_S).text
    found = re.search(rf'localllm_generated_tokens_total{{model="{MODEL}"}} (\S+)', text)
    return int(float(found[1])) if found else 0


@pytest.fixture(scope="module")
def slow_server(start_server: StartServer) -> Iterator[Server]:
    with start_server(begins=SLOWLY) as server:
        yield server


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/api/generate", "/v1/completions"])
def test_leaving_ends_the_work(slow_server: Server, stream: bool, path: str) -> None:
    server = slow_server
    before = generated(server)
    body = {**ENDLESS, "stream": stream, "max_tokens": 500, "temperature": 0, "seed": 1}
    connections = [send(server, body, path) for _ in range(3)]
    eventually(lambda: busy(server) == (3, 0))
    for connection in connections:
        connection.close()
    eventually(lambda: busy(server) == (0, 0))
    assert generated(server) - before < 3 * 450


# Prologue that takes a second for each piece of a text, and prints how it ends.
READS_SLOWLY = """
import sys, time
from gguf_io.tokenizer import Tokenizer
from gguf_io.tokenizer.sentence_pieces import SentencePieces
encode, whole = SentencePieces.encode, Tokenizer.encode
def slowly(self, text):
    if len(text) > 60_000:
        print("a piece is read", file=sys.stderr, flush=True)
        time.sleep(1)
    return encode(self, text)
def told(*arguments, **options):
    try:
        return whole(*arguments, **options)
    except BaseException as error:
        print(f"the text is given up: {type(error).__name__}", file=sys.stderr, flush=True)
        raise
SentencePieces.encode, Tokenizer.encode = slowly, told
"""


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/api/generate", "prompt"),
        ("/v1/completions", "prompt"),
        ("/tokenize", "content"),
        ("/v1/messages/count_tokens", "messages"),
        ("/completion", "prompt"),
    ],
)
def test_leaving_while_a_long_text_is_read(start_server: StartServer, path: str, field: str) -> None:
    text: Any = "once upon a time " * 300_000
    if path == "/completion":
        text = [1, text]
    with start_server(begins=READS_SLOWLY) as server:
        body = {"model": MODEL, field: [{"role": "user", "content": text}] if field == "messages" else text}
        connection = send(server, body, path)
        eventually(lambda: "a piece is read" in server.log.read_text())
        connection.close()
        eventually(lambda: "the text is given up: ClientGoneError" in server.log.read_text())


def test_leaving_the_queue(start_server: Any) -> None:
    with start_server(begins=SLOWLY, LOCALLLM_PARALLEL="1") as server:
        first = send(server, {**ENDLESS, "stream": False})
        eventually(lambda: busy(server)[0] == 1)
        queued = [send(server, {**ENDLESS, "stream": stream}) for stream in (True, False)]
        eventually(lambda: busy(server) == (1, 2))
        for connection in queued:
            connection.close()
        eventually(lambda: busy(server) == (1, 0))
        first.close()
        eventually(lambda: busy(server) == (0, 0))


def test_a_reader_that_stops_pauses_only_itself(server: Any) -> None:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps({**ENDLESS, "logprobs": True, "top_logprobs": 20}).encode()
    connection.sendall(
        f"POST /api/generate HTTP/1.1\r\nHost: x.localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    eventually(lambda: busy(server)[0] == 1)
    quick = {"model": MODEL, "prompt": "Hi", "stream": False, "options": {"num_predict": 4}}
    for _ in range(5):
        assert httpx.post(server.url + "/api/generate", json=quick, timeout=PATIENCE_S).status_code == 200
    assert busy(server)[0] == 1  # it has not run to its end into some buffer
    connection.close()
    eventually(lambda: busy(server) == (0, 0))


def test_stopping_lets_requests_end(start_server: Any) -> None:
    with start_server(LOCALLLM_GRACE_S="600") as server:
        body = {**ENDLESS, "options": {"num_predict": 300, "temperature": 0}, "stream": True}
        with httpx.stream("POST", server.url + "/api/generate", json=body, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(STOP)
            last = json.loads(list(lines)[-1])
        assert last["done"] and last["eval_count"] == 300
        assert server.process.wait() is not None
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health", timeout=PATIENCE_S)


def test_stopping_cancels_after_the_grace_time(start_server: Any) -> None:
    with start_server(LOCALLLM_GRACE_S="1") as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = json.dumps({**ENDLESS, "logprobs": True, "top_logprobs": 20}).encode()
        connection.sendall(
            f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        eventually(lambda: busy(server)[0] == 1)
        server.process.send_signal(STOP)
        server.process.wait()
        connection.close()


def test_models_are_unloaded_for_others_and_by_time(start_server: Any) -> None:
    with start_server("--max-models", "1", "--keep-alive", "1s") as server:

        def loaded() -> list[str]:
            return [model["name"] for model in httpx.get(server.url + "/api/ps", timeout=PATIENCE_S).json()["models"]]

        for name in (MODEL, "tinystories656K-Q8_0", MODEL):
            body = {"model": name, "prompt": "Hi", "stream": False, "options": {"num_predict": 1}, "keep_alive": -1}
            assert httpx.post(server.url + "/api/generate", json=body, timeout=PATIENCE_S).status_code == 200
            assert loaded() == [name]
        httpx.post(server.url + "/api/generate", json={"model": MODEL, "keep_alive": "100ms"}, timeout=PATIENCE_S)
        eventually(lambda: loaded() == [])


def test_too_little_memory_is_refused_with_the_sums(start_server: Any) -> None:
    with start_server(LOCALLLM_MEMORY_MIB="100") as server:
        answer = httpx.post(server.url + "/api/generate", json={"model": MODEL, "prompt": "Hi"}, timeout=PATIENCE_S)
        assert answer.status_code == 503
        assert all(word in answer.json()["error"] for word in ("available", "weights", "KV cache", "MiB"))


def test_a_full_queue_says_when_to_come_back(start_server: Any) -> None:
    with start_server(begins=SLOWLY, OLLAMA_MAX_QUEUE="2", LOCALLLM_PARALLEL="1") as server:
        held = [send(server, ENDLESS | {"stream": False}) for _ in range(2)]
        eventually(lambda: sum(busy(server)) == 2)
        refused = httpx.post(
            server.url + "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
            timeout=PATIENCE_S,
        )
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert httpx.get(server.url + "/health", timeout=PATIENCE_S).json()["status"] == "ok"
        for connection in held:
            connection.close()


def test_a_looping_template_does_not_block_others(start_server: Any, model_files: Path, tmp_path: Path) -> None:
    template = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    hostile = tmp_path / "hostile.gguf"
    script = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template", template]
    subprocess.run([*script, str(model_files / f"{MODEL}.gguf"), str(hostile)], check=True, capture_output=True)
    with start_server("--model", str(hostile)) as server:
        raw = {"model": "hostile", "prompt": "Hi", "raw": True, "options": {"num_predict": 1}}
        assert httpx.post(server.url + "/api/generate", json=raw, timeout=PATIENCE_S).status_code == 200
        body = {"model": "hostile", "messages": [{"role": "user", "content": "Hi"}]}
        stuck = send(server, body, "/api/chat")
        answered = 0
        while not select.select([stuck], [], [], 0)[0]:
            assert httpx.get(server.url + "/health", timeout=PATIENCE_S).status_code == 200
            answered += not select.select([stuck], [], [], 0)[0]
        assert answered > 0
        assert b" 400 " in stuck.recv(64)
        stuck.close()


def test_nothing_that_was_said_is_logged(start_server: Any) -> None:
    with start_server() as server:
        body = {"model": MODEL, "prompt": "my secret garden", "stream": False, "options": {"num_predict": 4}}
        answer = httpx.post(server.url + "/api/generate", json=body, timeout=PATIENCE_S).json()["response"]
        httpx.post(server.url + "/api/generate", json=body | {"options": {"secret garden": 1}}, timeout=PATIENCE_S)
        server.process.send_signal(STOP)
        server.process.wait()
        log = server.log.read_text(encoding="utf-8")
    assert "secret" not in log and answer.strip() not in log


def test_metrics_tell_what_happened(server: Any) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time there was", "stream": False, "options": {"num_predict": 3}}
    for _ in range(2):
        httpx.post(server.url + "/api/generate", json=body, timeout=PATIENCE_S)
    text = httpx.get(server.url + "/metrics", timeout=PATIENCE_S).text
    for name in (
        'localllm_requests_total{route="/api/generate",status="200"}',
        f'localllm_ttft_seconds_count{{model="{MODEL}",user=""}}',
        f'localllm_itl_seconds_bucket{{le="0.5",model="{MODEL}",user=""}}',
        f'localllm_prefix_hit_tokens_total{{model="{MODEL}",tier="memory"}}',
        f'localllm_kv_pages{{model="{MODEL}"}}',
        "localllm_preemptions_total",
        "localllm_memory_bytes",
    ):
        assert name in text, name
    health = httpx.get(server.url + "/health", timeout=PATIENCE_S).json()
    assert health["ready"] is True


def test_readiness_needs_a_token_that_was_computed(start_server: StartServer) -> None:
    with start_server() as server:

        def ready(**query: str) -> tuple[int, Any]:
            answer = httpx.get(server.url + "/health/ready", params=query, timeout=PATIENCE_S)
            return answer.status_code, answer.json()

        assert ready()[0] == 503
        assert ready(model="none")[0] == 404
        assert ready(model=MODEL) == (200, {"status": "ok", "ready": True, "models_loaded": 1, "models_loading": 0})
        assert ready()[0] == 200
