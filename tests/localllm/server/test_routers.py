"""The routers of docs/routers in front of two servers, ours or llama-server. TEST_ROUTERS: a folder that has both."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.llama_server import llama_program, needs_program
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


TOKENS = 2
"""What each answer has."""


@dataclass(frozen=True)
class Behind:
    """A server behind a router. tokens: the name of its count of generated tokens in /metrics."""

    url: str
    stop: Callable[[], None]
    tokens: str

    def answered(self) -> int:
        """How many chats it has answered."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        found = re.search(rf"^{self.tokens}(?:\{{.*\}})? ([\d.]+)$", text, re.MULTILINE)
        return int(float(found[1])) // TOKENS if found else 0


@pytest.fixture(params=["localllm", pytest.param("llama-server", marks=needs_program)])
def two(request: pytest.FixtureRequest, start_server: StartServer, model_files: Path) -> Iterator[list[Behind]]:
    with contextlib.ExitStack() as running, contextlib.ExitStack() as other:
        yield [_behind(request.param, stack, start_server, model_files) for stack in (running, other)]


def _behind(kind: str, running: contextlib.ExitStack, start_server: StartServer, model_files: Path) -> Behind:
    if kind == "localllm":
        server: Server = running.enter_context(start_server(models=(MODEL,)))

        def stop() -> None:
            server.process.kill()
            server.process.wait()

        return Behind(server.url, stop, "localllm_generated_tokens_total")
    arguments = ("--metrics", "--parallel", "2", "--ctx-size", "1024")
    address = running.enter_context(llama_program(model_files / f"{MODEL}.gguf", MODEL, "", *arguments))
    return Behind(address, running.close, "llamacpp:tokens_predicted_total")


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
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0}
    answer = http.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_cache_aware_router_keeps_conversations_where_their_prefix_is(
    programs: Path, two: list[Behind], tmp_path: Path
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
            before = [server.answered() for server in two]
            usages = [ask(http, url, MODEL, f"{story} {turn}")["usage"] for turn in range(4)]
            grown = [server.answered() - count for server, count in zip(two, before, strict=True)]
            assert sorted(grown) == [0, 4]
            tokens, cached = (usages[-1][name] for name in ("prompt_tokens", "prompt_tokens_details"))
            assert cached["cached_tokens"] > tokens // 2
        (two[0] if two[0].answered() else two[1]).stop()
        # Until a health check fails, requests for the missing server get a 500.
        eventually(lambda: healthy() == 1, "the router does not notice that a server is gone")
        for story in TALES.values():
            assert ask(http, url, MODEL, f"{story} again")["usage"]["completion_tokens"] == TOKENS


def test_litellm_retries_and_falls_back(programs: Path, two: list[Behind], tmp_path: Path) -> None:
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
            assert ask(http, url, "smart", text)["usage"]["completion_tokens"] == TOKENS
        first.stop()
        for text in TALES:
            assert ask(http, url, "smart", text)["usage"]["completion_tokens"] == TOKENS
