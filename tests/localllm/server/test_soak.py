"""Mixed load for a while: answers stay right, and nothing is left behind."""

import contextlib
import random
import re
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.waiting import PATIENCE_S

MODEL = "stories260K-Q8_0"
WARM_S, MEASURED_S = 10, 30
CLIENTS = 6
FIXED = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "stream": False,
    "options": {"temperature": 0, "num_predict": 20},
}


def client_at_work(url: str, number: int, stop: threading.Event, expected: str, wrong: list[str]) -> None:
    dice = random.Random(number)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        while not stop.is_set():
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


@pytest.mark.slow
def test_mixed_load_leaves_nothing_behind(start_server: Any) -> None:
    with start_server(LOCALLLM_DISK_CACHE="false") as server:
        expected = httpx.post(server.url + "/api/generate", json=FIXED, timeout=PATIENCE_S).json()["response"]
        process = psutil.Process(server.process.pid)
        stop, wrong = threading.Event(), []
        work = (server.url, stop, expected, wrong)
        threads = [
            threading.Thread(target=client_at_work, args=(work[0], number, *work[1:])) for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        time.sleep(WARM_S)
        warm = process.memory_info().rss
        time.sleep(MEASURED_S)
        grown = process.memory_info().rss - warm
        stop.set()
        for thread in threads:
            thread.join()
        time.sleep(1)
        metrics = httpx.get(server.url + "/metrics", timeout=PATIENCE_S).text
        assert wrong == []
        assert grown < 8 * 2**20
        assert process.num_fds() < 30
        for name in ("running_requests", "waiting_requests"):
            assert re.search(rf"localllm_{name}{{.*}} 0\.0\n", metrics), name
