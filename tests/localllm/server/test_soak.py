"""Mixed load: answers stay right, and nothing leaks."""

import contextlib
import random
import re
import threading
from typing import Any

import httpx
import psutil
import pytest

from tests.waiting import PATIENCE_S, eventually

MODEL = "stories260K-Q8_0"
CLIENTS = 6
WARMING, MEASURED = 25, 30  # requests per client, until everything is cached that is cached once, and after that
FIXED = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "stream": False,
    "options": {"temperature": 0, "num_predict": 20},
}


def client_at_work(url: str, dice: random.Random, requests: int, expected: str, wrong: list[str]) -> None:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        for _ in range(requests):
            kind = dice.random()
            if kind < 0.4:
                answer = client.post("/api/generate", json=FIXED)
                if answer.status_code != 503 and answer.json().get("response") != expected:
                    wrong.append(answer.text)
            elif kind < 0.7:
                messages = [{"role": "user", "content": f"Tell of {dice.random()}"}]
                body = {
                    "model": MODEL,
                    "messages": messages,
                    "stream": True,
                    "max_tokens": 200,
                    "n": dice.choice([1, 2]),
                }
                with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    for count, _ in enumerate(answer.iter_lines()):
                        if count > dice.randint(1, 60):
                            break
            elif kind < 0.85:
                body = {"model": MODEL, "prompt": f"{dice.random()} " * 20, "stream": dice.random() < 0.5}
                with contextlib.suppress(httpx.TimeoutException):
                    client.post("/api/generate", json=body, timeout=dice.random() * 0.1 + 0.01)
            else:
                client.post("/v1/completions", json={"model": MODEL, "prompt": f"{dice.random()}", "max_tokens": 30})


def is_idle(url: str) -> bool:
    """Whether no request runs or waits."""
    metrics = httpx.get(url + "/metrics", timeout=PATIENCE_S).text
    names = ("running_requests", "waiting_requests")
    return all(re.search(rf"localllm_{name}{{.*}} 0\.0\n", metrics) for name in names)


@pytest.mark.slow
def test_mixed_load_leaves_nothing_behind(start_server: Any) -> None:
    with start_server(LOCALLLM_DISK_CACHE="false") as server:
        expected = httpx.post(server.url + "/api/generate", json=FIXED, timeout=PATIENCE_S).json()["response"]
        process = psutil.Process(server.process.pid)
        dice, wrong = [random.Random(number) for number in range(CLIENTS)], []

        def rest_after(requests: int) -> int:
            """The server's memory after this many requests of each client."""
            work = ((server.url, one, requests, expected, wrong) for one in dice)
            threads = [threading.Thread(target=client_at_work, args=arguments) for arguments in work]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            eventually(lambda: is_idle(server.url))
            return int(process.memory_info().rss)

        warm = rest_after(WARMING)
        assert rest_after(MEASURED) - warm < 3 * 2**20
        assert process.num_fds() < 30
        assert wrong == []
