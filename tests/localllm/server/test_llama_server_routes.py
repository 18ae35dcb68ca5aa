"""Routes of llama-server, tested as its documentation describes them."""

import json
from datetime import date
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
    ids = posted(server, "/completion", **body | {"stream": False, "return_tokens": True})["tokens"]
    assert [entry["id"] for entry in found] == ids and found[0]["top_logprobs"][0]["id"] == ids[0]


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


@pytest.mark.parametrize(
    "path", ["/v1/models/", "/api/tags/", "/api/version//", "//health/", "/props/", "//v1//models"]
)
def test_slashes_more_than_needed_change_nothing(server: Server, path: str) -> None:
    named = {"model": MODEL}  # the server of other tests may have several in memory
    with_slash = httpx.get(f"{server.url}{path}", params=named)
    without = httpx.get(f"{server.url}{path.replace('//', '/').rstrip('/')}", params=named)
    assert (with_slash.status_code, with_slash.json()) == (200, without.json())
    body = {"model": MODEL, "prompt": STORY, "max_tokens": 2, "stream": False}
    assert posted(server, "/v1/completions/", **body)["usage"]["completion_tokens"] == 2


def test_the_tokens_of_an_input(server: Server) -> None:
    asked = {"model": MODEL, "input": "How many are these?"}
    counted = posted(server, "/v1/responses/input_tokens", **asked)
    used = posted(server, "/v1/responses", **asked, max_output_tokens=1)["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used}


def test_the_only_model_needs_no_name(start_server: Any, model_files: Any) -> None:
    with start_server("--model", str(model_files / "stories260K-Q8_0.gguf"), models=()) as server:
        assert posted(server, "/completion", prompt=STORY, n_predict=2)["tokens_predicted"] == 2
        assert posted(server, "/tokenize", content="Hi")["tokens"]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/chat/completions/input_tokens"):
            posted(server, path, **chat)
        posted(server, "/v1/completions", prompt=STORY, max_tokens=2)
        posted(server, "/v1/responses", input=STORY, max_output_tokens=2)
        posted(server, "/v1/embeddings", input=STORY)
        nameless = httpx.request("DELETE", f"{server.url}/api/delete", json={}, timeout=PATIENCE_S)
        assert nameless.status_code == 400, "what changes the library needs a name"


def test_fields_of_a_response(server: Server) -> None:
    asked = {"model": MODEL, "prompt": STORY, "n_predict": 4, "seed": 7}
    wanted = ["content", "generation_settings/n_predict", "generation_settings/nothing", "no/such/field"]
    for stream in (False, True):
        answer = httpx.post(
            f"{server.url}/completion",
            json={**asked, "response_fields": wanted, "stream": stream},
            timeout=PATIENCE_S,
        )
        told = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
        assert told.keys() == {"content", "generation_settings/n_predict"}
        assert told["generation_settings/n_predict"] == 4


def test_the_prompt_as_it_was_computed(server: Server) -> None:
    told = posted(server, "/completion", model=MODEL, prompt=STORY, n_predict=1)
    assert told["prompt"] == f"<s> {STORY}" and told["truncated"] is False


def test_an_answer_that_fills_the_context_is_truncated(server: Server) -> None:
    told = posted(server, "/completion", model=MODEL, prompt=STORY, n_predict=-1, ignore_eos=True, num_ctx=40)
    assert told["stop_type"] == "limit" and told["truncated"] is True
    assert told["tokens_evaluated"] + told["tokens_predicted"] == 40


def test_prompts_as_objects_and_several_answers(server: Server) -> None:
    asked = {"model": MODEL, "n_predict": 4, "temperature": 0}
    plain = posted(server, "/completion", **asked, prompt=STORY)["content"]
    assert posted(server, "/completion", **asked, prompt={"prompt_string": STORY})["content"] == plain
    both = posted(server, "/completion", **asked, prompt=[{"prompt_string": STORY}, STORY], n_cmpl=2)
    assert [one["content"] for one in both] == [plain] * 4 and [one["index"] for one in both] == [0, 1, 2, 3]


def test_biases_in_pairs(server: Server) -> None:
    asked = {"model": MODEL, "prompt": STORY, "n_predict": 4, "temperature": 0, "return_tokens": True}
    first, *_ = posted(server, "/completion", **asked)["tokens"]
    banned = posted(server, "/completion", **asked, logit_bias=[[first, False]])["tokens"]
    assert first not in banned
    assert banned == posted(server, "/completion", **asked, logit_bias={str(first): -1000.0})["tokens"]
    text = "z"
    wished = posted(server, "/completion", **asked, logit_bias=[[text, 1000.0]])["content"]
    assert wished.count("z") >= 3


def test_the_samplers_that_are_named(server: Server) -> None:
    asked = {"model": MODEL, "prompt": STORY, "n_predict": 8, "seed": 3, "temperature": 1.5}
    alone = posted(server, "/completion", **asked, samplers=["temperature"])["content"]
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert alone == posted(server, "/completion", **asked, **neutral)["content"]
    one = {"samplers": ["top_k", "temperature"], "top_k": 1}
    greedy = posted(server, "/completion", **{**asked, "temperature": 0})["content"]
    assert posted(server, "/completion", **asked, **one)["content"] == greedy


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_after_sampling(server: Server, stream: bool) -> None:
    asked = {"model": MODEL, "prompt": STORY, "n_predict": 3, "seed": 1, "n_probs": 4, "post_sampling_probs": True}

    def entries(**fields: Any) -> list[dict[str, Any]]:
        body = {**asked, **fields, "stream": stream}
        lines = httpx.post(f"{server.url}/completion", json=body, timeout=PATIENCE_S).text.splitlines()
        told = [json.loads(line.removeprefix("data: ")) for line in lines if line not in ("", "data: [DONE]")]
        return [entry for one in told for entry in one.get("completion_probabilities", ())]

    several = entries(samplers=["top_k", "temperature"], top_k=2, temperature=1.5)
    assert len(several) == 3
    for entry in several:
        assert entry.keys() == {"id", "token", "bytes", "prob", "top_probs"}
        assert entry["prob"] in [one["prob"] for one in entry["top_probs"]]
        assert [one["prob"] for one in entry["top_probs"]] == sorted(o["prob"] for o in entry["top_probs"])[::-1]
        assert len(entry["top_probs"]) == 2 and sum(one["prob"] for one in entry["top_probs"]) == pytest.approx(1)
    for entry in entries(temperature=0):
        assert entry["prob"] == 1 and [one["id"] for one in entry["top_probs"]] == [entry["id"]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"samplers": ["temperature", "top_k"]}, "in this order"),
        ({"samplers": ["warmth"]}, "samplers must be"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["AA"]}}, "prompt_string"),
        ({"prompt": {}}, "prompt_string"),
        ({"logit_bias": [["a"]]}, "logit_bias"),
    ],
)
def test_what_would_change_the_answer_is_refused(server: Server, body: dict[str, Any], said: str) -> None:
    asked = {"model": MODEL, "prompt": STORY, "n_predict": 1, **body}
    answer = httpx.post(f"{server.url}/completion", json=asked, timeout=PATIENCE_S)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/infill"])
def test_progress_in_llama_servers_fields(server: Server, path: str) -> None:
    text = "A story of many words. " * 12
    prompt: dict[str, Any] = {"prompt": text}
    if path.endswith("chat/completions"):
        prompt = {"messages": [{"role": "user", "content": text}]}
    body = {"model": MODEL, **prompt, "max_tokens": 1, "stream": True, "return_progress": True}
    if path == "/infill":
        assert httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S).status_code == 400  # no such tokens
        return
    text = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert told and all(one.keys() == {"total", "cache", "processed", "time_ms"} for one in told)
    assert all(one["cache"] <= one["processed"] <= one["total"] for one in told)


def test_timings_with_every_token(server: Server) -> None:
    body = {"model": MODEL, "prompt": STORY, "n_predict": 4, "stream": True, "timings_per_token": True}
    text = httpx.post(f"{server.url}/completion", json=body, timeout=PATIENCE_S).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert all(event["timings"]["predicted_n"] >= 1 for event in events)


def test_the_tokens_of_a_chat(server: Server) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    counted = posted(server, "/v1/chat/completions/input_tokens", **chat)["input_tokens"]
    used = posted(server, "/v1/chat/completions", **chat, max_tokens=1)["usage"]["prompt_tokens"]
    assert counted == used


def test_vectors_in_llama_servers_form(server: Server) -> None:
    told = posted(server, "/embedding", model=MODEL, content=["a story", "a dog"])
    assert [one["index"] for one in told] == [0, 1] and all(len(one["embedding"]) == 1 for one in told)
    (openai,) = posted(server, "/v1/embeddings", model=MODEL, input="a dog")["data"]
    assert told[1]["embedding"][0] == pytest.approx(openai["embedding"])
    other = {"model": MODEL, "content": "a", "embd_normalize": -1}
    assert httpx.post(f"{server.url}/embedding", json=other, timeout=PATIENCE_S).status_code == 400


def test_a_model_without_adapters_lists_none(server: Server) -> None:
    told = httpx.get(f"{server.url}/lora-adapters", params={"model": MODEL}, timeout=PATIENCE_S)
    assert (told.status_code, told.json()) == (200, [])


@pytest.mark.parametrize("path", ["/props", "/slots/0?action=save"])
def test_what_requests_do_not_change(server: Server, path: str) -> None:
    answer = httpx.post(f"{server.url}{path}", json={}, timeout=PATIENCE_S)
    assert answer.status_code == 501 and answer.json()["error"]["type"] == "not_supported_error"


@pytest.mark.parametrize(
    "extra", [{"text": "a"}, [{"filename": "a"}], [{"filename": 12, "text": "a"}], ["a"], [{"text": 1}]]
)
def test_extra_texts_that_are_malformed(server: Server, extra: Any) -> None:
    body = {"model": MODEL, "input_prefix": "a", "input_suffix": "b", "input_extra": extra}
    answer = httpx.post(f"{server.url}/infill", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400 and "input_extra" in answer.json()["error"]["message"]


def test_templates_that_ask_for_the_date(start_server: Any, model_files: Any, tmp_path: Any) -> None:
    """llama.cpp sets the date under this name; Llama 3's templates otherwise default to a date in 2024."""
    from tests.localllm.server.made_models import with_metadata

    template = (
        "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}Today: {{ date_string }}"
    )
    path = tmp_path / "dated.gguf"
    with_metadata(model_files / f"{MODEL}.gguf", path, "--chat-template", template)
    with start_server("--model", str(path), models=()) as server:
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        before, told, after = date.today(), posted(server, "/apply-template", **chat)["prompt"], date.today()
        assert told in {f"Today: {day:%d %b %Y}" for day in (before, after)}
        given = {**chat, "model": "dated", "chat_template_kwargs": {"date_string": "1 Jan 2000"}}
        count = posted(server, "/v1/chat/completions/input_tokens", **given)["input_tokens"]
        ids = posted(server, "/tokenize", content="Today: 1 Jan 2000", add_special=True)["tokens"]
        assert count == len(ids)
