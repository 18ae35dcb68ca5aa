"""The routers of docs/routers in front of two of our servers. TEST_ROUTERS: a virtual environment with both."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.ports import free_port
from tests.localllm.server.conftest import MODEL, Server, StartServer
from tests.waiting import PATIENCE_S, eventually

ROUTERS = Path(__file__).resolve().parents[3] / "docs" / "routers"
TALES = {
    "a cat": "A story about a cat that went to the sea and back again. " * 3,
    "the moon": "Tell of the moon and of nothing but the moon this night. " * 3,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def programs() -> Path:
    if "TEST_ROUTERS" not in os.environ:
        pytest.skip("TEST_ROUTERS names no virtual environment with sglang-router and litellm[proxy]")
    return Path(os.environ["TEST_ROUTERS"]).resolve() / "bin"


@pytest.fixture
def two(start_server: StartServer) -> Iterator[tuple[Server, Server]]:
    with start_server(models=(MODEL,)) as first, start_server(models=(MODEL,)) as second:
        yield first, second


@contextlib.contextmanager
def running(command: list[str], url: str, home: Path, **variables: str) -> Iterator[httpx.Client]:
    """A router and the processes it started, until the block ends."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("LOCALLLM_")}
    log = home / "router.log"
    with log.open("wb") as told, httpx.Client(timeout=PATIENCE_S, trust_env=False) as http:
        process = subprocess.Popen(
            command,
            env=inherited | {"HOME": str(home)} | variables,
            cwd=home,
            stdout=told,
            stderr=told,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

        def answers() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")
            with contextlib.suppress(httpx.HTTPError):
                return http.get(url).status_code == 200
            return False

        try:
            eventually(answers, f"{command[0]} does not start")
            yield http
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def ask(http: httpx.Client, url: str, model: str, text: str) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
    answer = http.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def answered(server: Server) -> int:
    """How many chats a server has answered."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    found = re.search(r'localllm_requests_total\{route="/v1/chat/completions",status="200"\} (\d+)', text)
    return int(found[1]) if found else 0


def test_a_cache_aware_router_keeps_conversations_where_their_prefix_is(
    programs: Path, two: tuple[Server, Server], tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "ROUTER_PORT": str(port),
        "ROUTER_METRICS_PORT": str(port + 1),
        "ROUTER_HEALTH_S": "1",
    }
    script = str(ROUTERS / "cache_aware.sh")
    command = [script, *(server.url for server in two)]
    with running(command, f"{url}/readiness", tmp_path, **variables) as http:
        healthy = lambda: http.get(f"{url}/workers").text.count('"is_healthy":true')  # noqa: E731
        eventually(lambda: healthy() == 2, "the router does not know both servers")
        for story in TALES.values():
            before = [answered(server) for server in two]
            usages = [ask(http, url, MODEL, f"{story} {turn}")["usage"] for turn in range(4)]
            grown = [answered(server) - count for server, count in zip(two, before, strict=True)]
            assert sorted(grown) == [0, 4]
            tokens, cached = (usages[-1][name] for name in ("prompt_tokens", "prompt_tokens_details"))
            assert cached["cached_tokens"] > tokens // 2
        gone = two[0] if answered(two[0]) else two[1]
        gone.process.kill()
        gone.process.wait()
        # Until a health check fails, requests for the missing server get a 500.
        eventually(lambda: healthy() == 1, "the router does not notice that a server is gone")
        for story in TALES.values():
            assert ask(http, url, MODEL, f"{story} again")["usage"]["completion_tokens"] == 2


def test_litellm_retries_and_falls_back(programs: Path, two: tuple[Server, Server], tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    first, second = two
    variables = {
        "LOCALLLM_A": f"{first.url}/v1",
        "LOCALLLM_B": f"{second.url}/v1",
        "LOCALLLM_KEY": "none",
        "LOCALLLM_MODEL": f"openai/{MODEL}",
        "LOCALLLM_SMALL": f"openai/{MODEL}",
        "LITELLM_MASTER_KEY": f"sk-{secrets.token_hex(24)}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [str(programs / "litellm"), "--config", str(ROUTERS / "litellm.yaml"), "--host", "127.0.0.1"]
    with running([*command, "--port", str(port)], f"{url}/health/liveliness", tmp_path, **variables) as http:
        http.headers["Authorization"] = f"Bearer {variables['LITELLM_MASTER_KEY']}"
        assert {row["id"] for row in http.get(f"{url}/v1/models").json()["data"]} == {"smart", "small"}
        for text in TALES:
            assert ask(http, url, "smart", text)["usage"]["completion_tokens"] == 2
        first.process.kill()
        first.process.wait()
        for text in TALES:
            assert ask(http, url, "smart", text)["usage"]["completion_tokens"] == 2
