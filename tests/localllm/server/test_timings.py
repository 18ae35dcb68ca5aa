"""llama-server's timings and progress in answers of OpenAI's routes."""

import json
from typing import Any

import httpx
import pytest

from tests.localllm.server.conftest import MODEL, Server
from tests.waiting import PATIENCE_S

CHAT = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 6}
ASKED = [
    ("/v1/chat/completions", CHAT),
    ("/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "Once upon a time", "n_predict": 6}),
    ("/v1/responses", {"input": "Once upon a time", "max_output_tokens": 6}),
    ("/responses", {"input": "Once upon a time", "max_output_tokens": 6}),
]


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    answer = httpx.post(f"{server.url}{path}", json={"model": MODEL, **body}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer


def streamed(server: Server, path: str, **body: Any) -> list[Any]:
    lines = post(server, path, stream=True, **body).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_whole_answer_has_timings(server: Server, path: str, body: dict[str, Any]) -> None:
    told = post(server, path, **body).json()
    timings, used = told["timings"], told["usage"]
    assert timings["predicted_n"] == 6 and timings["predicted_ms"] > 0 and timings["predicted_per_second"] > 0
    prompt = used.get("prompt_tokens", used.get("input_tokens"))
    assert timings["prompt_n"] + timings["cache_n"] == prompt
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 5)  # the first ended the prompt


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(("path", "body"), ASKED)
def test_the_last_chunk_of_a_stream_has_timings(server: Server, path: str, body: dict[str, Any], usage: bool) -> None:
    more = {"stream_options": {"include_usage": True}} if usage and "responses" not in path else {}
    *others, last = streamed(server, path, **body, **more)
    assert last["timings"]["predicted_n"] == 6
    assert not any("timings" in chunk for chunk in others)


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_every_chunk_of_text_has_timings_if_wanted(server: Server, path: str, body: dict[str, Any]) -> None:
    chunks = streamed(server, path, **body, timings_per_token=True)
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    assert len(counts) > 2 and counts == sorted(counts) and counts[-1] == 6
    assert "timings" not in chunks[0] or "completions" in path


def test_each_choice_has_timings(server: Server) -> None:
    chunks = streamed(server, "/v1/chat/completions", **CHAT, n=2)
    ends = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(chunk["choices"][0]["index"] for chunk in ends) == [0, 1]
    assert all(chunk["timings"]["predicted_n"] == 6 for chunk in ends)


def test_progress_of_responses_in_llama_servers_fields(server: Server) -> None:
    text = "A story of many words. " * 12
    events = streamed(server, "/v1/responses", input=text, max_output_tokens=1, return_progress=True)
    found = [event for event in events if "prompt_progress" in event]
    assert found and {event["type"] for event in found} == {"response.in_progress"}
    last = found[-1]["prompt_progress"]
    assert 0 <= last["cache"] <= last["processed"] == last["total"]


@pytest.mark.parametrize(("path", "status"), [("/chat/completions", "exceed"), ("/v1/chat/completions", "invalid")])
def test_the_type_of_a_prompt_that_is_too_long(server: Server, path: str, status: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Once upon a time. " * 400}]}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"].startswith(status)
    assert error["n_prompt_tokens"] > error["n_ctx"] and error["code"] == "context_length_exceeded"
