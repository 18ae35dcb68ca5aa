"""Routes of llama-server, as its documentation describes requests and answers."""

import json
from typing import Any

import httpx
import pytest

from tests.localllm.server.conftest import MODEL, Server
from tests.waiting import PATIENCE_S

STORY = "Once upon a time"


def posted(server: Server, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_completion(server: Server) -> None:
    asked = {"model": MODEL, "prompt": STORY, "n_predict": 8, "temperature": 0}
    told = posted(server, "/completion", **asked, return_tokens=True)
    assert told["stop"] is True and told["stop_type"] == "limit" and told["stopping_word"] == ""
    assert told["tokens_predicted"] == 8 == len(told["tokens"]) == told["timings"]["predicted_n"]
    assert told["content"] == posted(server, "/completions", **asked)["content"]
    openai = posted(server, "/v1/completions", model=MODEL, prompt=STORY, max_tokens=8, temperature=0)
    assert told["content"] == openai["choices"][0]["text"]
    ids = posted(server, "/tokenize", model=MODEL, content=STORY, add_special=True)["tokens"]
    for prompt in (ids, [*ids[:2], *ids[2:]]):
        assert posted(server, "/completion", **asked | {"prompt": prompt})["content"] == told["content"]
    several = posted(server, "/completion", **asked | {"prompt": [STORY, ids]})
    assert [one["content"] for one in several] == [told["content"]] * 2 and several[1]["index"] == 1
    mixed = posted(server, "/completion", **asked | {"prompt": [ids[0], STORY]})
    assert mixed["tokens_evaluated"] >= len(ids)


def test_a_streamed_completion(server: Server) -> None:
    body = {"model": MODEL, "prompt": STORY, "n_predict": 8, "temperature": 0, "stream": True, "n_probs": 2}
    text = httpx.post(f"{server.url}/completion", json=body, timeout=PATIENCE_S).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    *pieces, last = events
    whole = posted(server, "/completion", **body | {"stream": False})
    assert "".join(piece["content"] for piece in pieces) == whole["content"] and last["content"] == ""
    assert not any(piece["stop"] for piece in pieces) and last["stop"] and last["stop_type"] == "limit"
    found = whole["completion_probabilities"]
    assert len(found) == 8 and all(len(entry["top_logprobs"]) == 2 for entry in found)


def test_what_holds_and_ends_a_completion(server: Server) -> None:
    asked = {"model": MODEL, "prompt": STORY, "n_predict": 60}
    held = posted(server, "/completion", **asked, grammar='root ::= "yes" | "no"')
    assert held["content"] in ("yes", "no") and held["stop_type"] == "eos"
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    assert json.loads(posted(server, "/completion", **asked, json_schema=schema)["content"]) == {"a": "x"}
    plain = posted(server, "/completion", **asked, temperature=0)["content"]
    word = plain.split()[3]
    stopped = posted(server, "/completion", **asked, temperature=0, stop=[word])
    assert stopped["stop_type"] == "word" and stopped["stopping_word"] == word
    assert plain.startswith(stopped["content"]) and word not in stopped["content"]
    both = httpx.post(f"{server.url}/completion", json={**asked, "grammar": "root ::= [a]", "json_schema": {}})
    assert both.status_code == 400 and "exclude" in both.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"prompt": []}, {"prompt": {"a": 1}}, {"prompt": STORY, "mirostat": 7}])
def test_completions_that_are_refused(server: Server, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/completion", json={"model": MODEL, **body}, timeout=PATIENCE_S)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == 400


def test_properties_and_slots(server: Server) -> None:
    told = httpx.get(f"{server.url}/props", params={"model": MODEL}, timeout=PATIENCE_S).json()
    settings = told["default_generation_settings"]
    assert settings["n_ctx"] > 0 and settings["params"]["top_k"] == 40 and told["total_slots"] > 0
    assert told["modalities"] == {"vision": False, "audio": False} and "/" not in told["model_alias"]
    slots = httpx.get(f"{server.url}/slots", timeout=PATIENCE_S).json()
    assert [slot["id"] for slot in slots] == list(range(len(slots))) and not any(
        slot["is_processing"] for slot in slots
    )
    assert httpx.get(f"{server.url}/v1/health").json()["status"] == "ok"


def test_routes_without_v1(server: Server) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    choices = [posted(server, path, **chat)["choices"] for path in ("/chat/completions", "/v1/chat/completions")]
    assert choices[0] == choices[1]
    assert httpx.get(f"{server.url}/models").json() == httpx.get(f"{server.url}/v1/models").json()


def test_the_tokens_of_an_input(server: Server) -> None:
    asked = {"model": MODEL, "input": "How many are these?"}
    counted = posted(server, "/v1/responses/input_tokens", **asked)
    used = posted(server, "/v1/responses", **asked, max_output_tokens=1)["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used}


def test_the_only_model_needs_no_name(start_server: Any, model_files: Any) -> None:
    with start_server("--model", str(model_files / "stories260K-Q8_0.gguf"), models=()) as server:
        assert posted(server, "/completion", prompt=STORY, n_predict=2)["tokens_predicted"] == 2
        assert posted(server, "/tokenize", content="Hi")["tokens"]
