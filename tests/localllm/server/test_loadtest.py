"""localllm loadtest against real servers: ours in both protocols, and llama-cpp-python's; cost against ours."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.llama_server import llama_server, needs_server
from tests.forking import Nursery
from tests.localllm.server.conftest import MODEL, StartServer
from tests.waiting import PATIENCE_S

REQUESTS = 6


def loadtest(children: Nursery, url: str, *arguments: str, key: str = "") -> dict[str, Any]:
    """The JSON of a test with REQUESTS requests per trial."""
    load = ("--requests", str(REQUESTS), "--answer-tokens", "8", "--json")
    done = children.run("loadtest", url, *load, *arguments, **({"LOCALLLM_REMOTE_KEY": key} if key else {}))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("api", ["openai", "ollama"])
def test_our_server(start_server: StartServer, children: Nursery, api: str) -> None:
    arguments = ["--api", api, "--model", MODEL, "--raw", "--prompt-tokens", "100:140", "--concurrency", "1,3"]
    with start_server(models=(MODEL,)) as server:
        report = loadtest(children, server.url, *arguments, "--shared-prefix", "60", "--slo", "e2e=600s")
    assert (report["api"], report["notes"]) == (api, [])
    for trial in report["trials"]:
        assert (trial["answered"], trial["complete"], trial["good"], trial["counted"]) == (
            REQUESTS,
            True,
            REQUESTS,
            True,
        )
        for outcome in trial["outcomes"]:
            # Words take several tokens of a vocabulary of 512, so lengths are only met on average.
            assert 60 <= outcome["prompt_tokens"] <= 200
            assert 1 <= outcome["generated_tokens"] <= 8
            assert 0 < outcome["ttft"] <= outcome["e2e"]
        # The first request of a trial computes the prefix; the others reuse it.
        assert sorted(outcome["cached_tokens"] for outcome in trial["outcomes"])[1] >= 40


@pytest.mark.slow
@pytest.mark.oracle
@needs_server
def test_llama_cpp_pythons_server(data_dir: Path, children: Nursery) -> None:
    model = data_dir / "models" / "gguf" / "stories260K-F32.gguf"
    with llama_server(model, "peer", "secret") as url:
        report = loadtest(children, url, "--raw", "--prompt-tokens", "100", "--rate", "20", key="secret")
    assert (report["api"], report["model"], report["notes"]) == ("openai", "peer", [])
    (trial,) = report["trials"]
    assert (trial["answered"], trial["complete"]) == (REQUESTS, True)
    assert all(outcome["pieces"] > 0 for outcome in trial["outcomes"])


@pytest.mark.slow
def test_cost_counts_what_our_server_has_served(start_server: StartServer, children: Nursery) -> None:
    with start_server(models=(MODEL,)) as server:
        prompt, generated = 0, 0
        for text in ("Once upon a time", "Once upon a time there was"):
            body = {"model": MODEL, "prompt": text, "max_tokens": 5, "temperature": 0}
            usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()["usage"]
            prompt, generated = prompt + usage["prompt_tokens"], generated + usage["completion_tokens"]
        done = children.run("cost", server.url, "--watts", "36", "--json")
    report = json.loads(done.stdout)
    assert report["models"].keys() == {MODEL}
    assert (report["total"]["prompt"], report["total"]["generated"]) == (prompt, generated)
    assert 0 < report["total"]["cached"] < prompt
    assert report["joules"] == pytest.approx(36 * report["seconds"])
