"""`localllm serve --remote`: every protocol in front of a scripted server of OpenAI's."""

import base64
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import ollama
import openai
import pytest

from tests.fakes.openai_server import ScriptedOpenAI, openai_server
from tests.waiting import PATIENCE_S, eventually

CALL = {"index": 0, "id": "up_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
# One dot.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedOpenAI]:
    with openai_server() as server:
        yield server


@pytest.fixture(scope="module")
def front(upstream: ScriptedOpenAI, start_server: Any) -> Iterator[str]:
    with start_server("--remote", upstream.address, models=(), LOCALLLM_REMOTE_KEY="upstream") as server:
        yield server.url


@pytest.fixture
def script(upstream: ScriptedOpenAI) -> Iterator[ScriptedOpenAI]:
    """Reset the scripted server's record."""
    upstream.pieces, upstream.refusal, upstream.asked, upstream.keys, upstream.paths = [], None, [], [], []
    upstream.json_answer = None
    upstream.gone.clear()
    yield upstream
    upstream.hold.set()


@pytest.fixture
def client(front: str) -> Iterator[ollama.Client]:
    with ollama.Client(host=front) as client:
        yield client


@pytest.fixture
def http(front: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=front, timeout=PATIENCE_S) as client:
        yield client


def test_ollamas_client_chats_and_thinks(client: ollama.Client, script: ScriptedOpenAI) -> None:
    script.says("Hel", "lo", prompt_tokens=9, completion_tokens=3)
    script.pieces.insert(0, {"reasoning_content": "Hm."})
    pieces = list(client.chat("tiny:latest", HI, stream=True, think=True, options={"top_k": 3, "num_predict": 7}))
    assert "".join(piece.message.content or "" for piece in pieces) == "Hello"
    assert "".join(piece.message.thinking or "" for piece in pieces) == "Hm."
    assert (pieces[-1].done_reason, pieces[-1].prompt_eval_count, pieces[-1].eval_count) == ("stop", 9, 3)
    (asked,) = script.asked
    assert asked["messages"] == HI and asked["chat_template_kwargs"] == {"enable_thinking": True}
    assert (asked["model"], asked["top_k"], asked["max_tokens"]) == ("tiny", 3, 7)
    assert not asked.keys() & {"temperature", "top_p", "seed"}, "what nobody set is the server's to decide"
    assert script.keys == ["Bearer upstream"] * len(script.keys)


def test_generate_is_a_chat_or_a_completion(client: ollama.Client, script: ScriptedOpenAI) -> None:
    script.says("Hello", finish="length")
    answer = client.generate("tiny", "Hi", system="Be short.", format={"type": "object"})
    assert (answer.response, answer.done_reason) == ("Hello", "length")
    assert [message["role"] for message in script.asked[0]["messages"]] == ["system", "user"]
    assert script.asked[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    script.pieces = [{"choices": [{"text": "{}", "finish_reason": "stop"}]}]
    assert client.generate("tiny", "Once", raw=True, format="json").response == "{}"
    assert client.generate("tiny", "a = ", suffix="; b").response == "{}"
    assert [asked["prompt"] for asked in script.asked[1:]] == ["Once", "a = "]
    # llama-server reads the second of these outside of chats, other servers the first.
    assert script.asked[1]["response_format"] == {"type": "json_object"}
    assert script.asked[1]["json_schema"] == {"type": "object"}
    assert script.asked[2]["suffix"] == "; b"
    assert script.paths[-1] == "/v1/completions"
    with pytest.raises(ollama.ResponseError, match="context"):
        client.generate("tiny", "Hi", context=[1, 2])


def test_lists_and_descriptions_come_from_the_server(front: str, client: ollama.Client, script: ScriptedOpenAI) -> None:
    assert [model.model for model in client.list().models] == ["tiny", "other", "third"]
    shown = client.show("tiny")
    assert shown.capabilities == ["completion", "tools"] and shown.modelinfo["remote.context_length"] == 512
    with openai.OpenAI(base_url=f"{front}/v1", api_key="-") as api:
        assert [model.id for model in api.models.list()] == ["tiny", "other", "third"]
        assert api.models.retrieve("other").owned_by == "remote"
    assert client.generate("other", "").done_reason == "load"
    row = next(row for row in client.ps().models if row.model == "other")
    assert row.size_vram == 0 and row.context_length == 64
    client.generate("other", "", keep_alive=0)
    assert "other" not in [row.model for row in client.ps().models]
    with pytest.raises(ollama.ResponseError, match="'absent' not found"):
        client.chat("absent", HI)


def test_openais_client_calls_tools_and_sends_results_back(front: str, script: ScriptedOpenAI) -> None:
    script.pieces = [
        {"role": "assistant", "tool_calls": [CALL]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
        {"tool_calls": [{"index": 1, "id": "up_2", "function": {"name": "weather", "arguments": "{}"}}]},
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    ]
    with openai.OpenAI(base_url=f"{front}/v1", api_key="-") as api:
        tools: Any = [TOOL]
        asking: Any = HI
        answer = api.chat.completions.create(model="tiny", messages=asking, tools=tools, tool_choice="required")
        found = answer.choices[0].message.tool_calls or []
        functions = [call.function for call in found if call.type == "function"]
        assert [(one.name, one.arguments) for one in functions] == [("weather", '{"city": "Oslo"}'), ("weather", "{}")]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert script.asked[0]["tool_choice"] == "required" and script.asked[0]["tools"] == [TOOL]
        script.says("Rain.")
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "wet"} for call in found]
        turns: Any = [*HI, answer.choices[0].message.model_dump(exclude_none=True), *results]
        streamed = api.chat.completions.create(model="tiny", messages=turns, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "Rain."
    sent = script.asked[1]["messages"]
    assert [message["tool_call_id"] for message in sent[2:]] == [call["id"] for call in sent[1]["tool_calls"]]


def test_what_llama_server_would_leave_out_is_refused(
    client: ollama.Client, http: httpx2.Client, script: ScriptedOpenAI
) -> None:
    """llama-server continues the prompt as if there were no suffix, and knows no regular expressions."""
    script.models = [{"id": "cpp", "owned_by": "llamacpp", "meta": {"n_ctx": 512}}, *script.models]
    with pytest.raises(ollama.ResponseError, match="does not support suffix") as refused:
        client.generate("cpp", "a = ", suffix="; b")
    assert refused.value.status_code == 501
    regex = {"model": "cpp", "messages": HI, "structured_outputs": {"regex": "yes|no"}}
    answer = http.post("/v1/chat/completions", json=regex)
    assert answer.status_code == 501 and "regular expressions" in answer.json()["error"]["message"] and not script.asked
    script.models = script.models[1:]


def test_a_tool_that_must_be_called_is_the_only_one(http: httpx2.Client, script: ScriptedOpenAI) -> None:
    """llama-server treats {"type": "function", ...} as "auto"."""
    script.says("Rain.")
    other = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    body: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": [other, TOOL]}
    named = {"type": "function", "function": {"name": "weather"}}
    assert http.post("/v1/chat/completions", json=body | {"tool_choice": named}).status_code == 200
    assert (script.asked[0]["tools"], script.asked[0]["tool_choice"]) == ([TOOL], "required")
    absent = {"type": "function", "function": {"name": "calendar"}}
    refused = http.post("/v1/chat/completions", json=body | {"tool_choice": absent})
    assert refused.status_code == 400 and "'calendar'" in refused.json()["error"]["message"]
    assert len(script.asked) == 1


def test_a_continued_answer_is_named_as_one(client: ollama.Client, script: ScriptedOpenAI) -> None:
    script.says("lo")
    client.chat("tiny", [*HI, {"role": "assistant", "content": "Hel"}])
    assert script.asked[0]["continue_final_message"] is True and script.asked[0]["add_generation_prompt"] is False


def test_ollamas_results_find_their_calls(client: ollama.Client, script: ScriptedOpenAI) -> None:
    script.says("Rain.")
    calls = [{"function": {"name": name, "arguments": {"at": name}}} for name in ("one", "two")]
    results = [{"role": "tool", "content": name, "tool_name": name} for name in ("two", "one")]
    client.chat("tiny", [*HI, {"role": "assistant", "content": "", "tool_calls": calls}, *results])
    sent = script.asked[0]["messages"]
    identities = {call["function"]["name"]: call["id"] for call in sent[1]["tool_calls"]}
    assert [(message["tool_call_id"], message["content"]) for message in sent[2:]] == [
        (identities["two"], "two"),
        (identities["one"], "one"),
    ]
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"at": "one"}


def test_images_go_on_as_they_are(http: httpx2.Client, script: ScriptedOpenAI) -> None:
    script.says("A dot.")
    dot = base64.b64encode(PNG).decode()
    messages = [{"role": "user", "content": "What is it?", "images": [dot]}]
    answer = http.post("/api/chat", json={"model": "tiny", "messages": messages, "stream": False})
    assert answer.status_code == 200, answer.text
    parts = script.asked[0]["messages"][0]["content"]
    assert {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{dot}"}} in parts
    assert {"type": "text", "text": "What is it?"} in parts


def test_anthropics_messages(http: httpx2.Client, script: ScriptedOpenAI) -> None:
    script.says("Hello", prompt_tokens=9, completion_tokens=2)
    script.pieces.insert(0, {"reasoning": "Hm."})
    body = {"model": "tiny", "max_tokens": 5, "messages": HI, "system": "Be short."}
    answer = http.post("/v1/messages", json=body).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["usage"]["input_tokens"] == 9
    assert script.asked[0]["max_tokens"] == 5 and "temperature" not in script.asked[0]
    refused = http.post("/v1/messages/count_tokens", json=body)
    assert refused.status_code == 501 and "the number of tokens" in refused.json()["error"]["message"]


def test_probabilities_and_several_choices(http: httpx2.Client, script: ScriptedOpenAI) -> None:
    told = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": [{"token": "Ho", "logprob": -1.0}]}
    script.pieces = [{"choices": [{"delta": {"content": "Hi"}, "logprobs": {"content": [told]}}]}]
    script.pieces.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    body = {"model": "tiny", "messages": HI, "n": 2, "seed": 4, "logprobs": True, "top_logprobs": 1}
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["Hi", "Hi"]
    (entry,) = choices[0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["top_logprobs"][0]["token"]) == ("Hi", -0.5, "Ho")
    assert sorted(asked["seed"] for asked in script.asked) == [4, 5]
    assert script.asked[0]["top_logprobs"] == 1
    older = {"tokens": ["a"], "token_logprobs": [-0.25], "top_logprobs": [{"b": -2.0}]}
    script.pieces = [{"choices": [{"text": "a", "logprobs": older, "finish_reason": "stop"}]}]
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "logprobs": 1}).json()
    with_itself = [{"a": -0.25, "b": -2.0}]  # in OpenAI's form
    assert answer["choices"][0]["logprobs"] == older | {"top_logprobs": with_itself, "text_offset": [0]}


def test_a_probability_without_rivals_is_asked_for_with_one(http: httpx2.Client, script: ScriptedOpenAI) -> None:
    """llama-server sends none if top_logprobs is 0, and sends those of completions in the form of chats."""
    told = {"id": 5, "token": "Hi", "bytes": [72, 105], "logprob": -0.5}
    rival = {"id": 6, "token": "Ho", "bytes": [72, 111], "logprob": -1.0}
    logprobs = {"content": [told | {"top_logprobs": [rival]}]}
    script.pieces = [{"choices": [{"delta": {"content": "Hi"}, "logprobs": logprobs}]}]
    script.pieces.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    chat = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, "logprobs": True}).json()
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["top_logprobs"]) == ("Hi", -0.5, [])
    script.pieces = [{"choices": [{"text": "Hi", "logprobs": logprobs, "finish_reason": "stop"}]}]
    body = {"model": "tiny", "prompt": "x", "logprobs": 0}
    found = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert (found["tokens"], found["token_logprobs"], found["top_logprobs"]) == (["Hi"], [-0.5], [{"Hi": -0.5}])
    assert [asked.get("top_logprobs", asked["logprobs"]) for asked in script.asked] == [1, 1]


def test_vectors_and_scores(http: httpx2.Client, script: ScriptedOpenAI) -> None:
    rows = [{"index": 1, "embedding": [0.0, 2.0]}, {"index": 0, "embedding": [3.0, 4.0]}]
    script.json_answer = {"data": rows, "usage": {"prompt_tokens": 5}}
    answer = http.post("/api/embed", json={"model": "tiny", "input": ["a", "b"]}).json()
    assert answer["embeddings"][1] == [0.0, 1.0] and answer["embeddings"][0] == pytest.approx([0.6, 0.8])
    assert answer["prompt_eval_count"] == 5 and script.asked[0]["input"] == ["a", "b"]
    assert len(http.post("/v1/embeddings", json={"model": "tiny", "input": ["a", "b"]}).json()["data"]) == 2
    assert "1 texts" in http.post("/api/embed", json={"model": "tiny", "input": "a"}).json()["error"]
    script.json_answer = {"results": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]}
    ranked = http.post("/v1/rerank", json={"model": "tiny", "query": "q", "documents": ["a", "b"]}).json()
    assert [row["index"] for row in ranked["results"]] == [1, 0]


@pytest.mark.parametrize(("theirs", "ours"), [(404, 404), (400, 400), (429, 429), (501, 501), (401, 502), (500, 502)])
def test_a_refusal_has_its_words_and_a_status(
    http: httpx2.Client, script: ScriptedOpenAI, theirs: int, ours: int
) -> None:
    script.refusal = (theirs, {"error": {"message": "not today"}})
    for stream in (True, False):
        answer = http.post("/api/chat", json={"model": "tiny", "messages": HI, "stream": stream})
        assert answer.status_code == ours
        assert "not today" in answer.json()["error"] and script.address in answer.json()["error"]


def test_an_error_midway_is_reported_in_the_stream(http: httpx2.Client, script: ScriptedOpenAI) -> None:
    script.pieces = [{"content": "So"}, {"error": {"message": "out of memory"}}]
    lines = http.post("/api/chat", json={"model": "tiny", "messages": HI}).text.splitlines()
    assert json.loads(lines[0])["message"]["content"] == "So"
    assert "out of memory" in json.loads(lines[-1])["error"]
    script.pieces = [{"content": [1, 2]}, {"choices": [{"delta": {"tool_calls": 3}}]}]
    whole = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
    assert whole.status_code == 502 and "does not follow its protocol" in whole.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_ends_the_work_behind(front: str, script: ScriptedOpenAI, stream: bool) -> None:
    script.pieces = [{"content": "Half"}]
    script.hold.clear()
    body = json.dumps({"model": "tiny", "messages": HI, "stream": stream}).encode()
    head = f"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(front.rpartition(":")[2]))) as leaving:
        leaving.sendall(head.encode() + body)
        eventually(lambda: script.asked)
        if stream:
            assert leaving.recv(1)
    assert script.gone.wait(PATIENCE_S)


def test_the_doors_are_the_same(http: httpx2.Client, script: ScriptedOpenAI) -> None:
    script.says("Hello")
    body = {"model": "tiny", "messages": HI}
    assert http.post("/api/chat", json=body, headers={"Origin": "http://evil.example"}).status_code == 403
    assert http.get("/api/tags", headers={"Host": "evil.example"}).status_code == 403
    assert not script.asked
    for route, content in (("/tokenize", {"content": "Hi"}), ("/apply-template", {"messages": HI})):
        answer = http.post(route, json={"model": "tiny", **content})
        assert answer.status_code == 501 and "OpenAI's protocol" in answer.json()["error"]["message"]
    refused = http.post("/api/pull", json={"model": "qwen3"})
    assert refused.status_code == 501 and script.address in refused.json()["error"]


def test_health_is_that_of_the_server_behind(http: httpx2.Client, upstream: ScriptedOpenAI, start_server: Any) -> None:
    assert http.get("/health").json() == {"status": "ok", "ready": True, "remote": f"{upstream.address}/v1"}
    assert 'route="/health"' in http.get("/metrics").text
    with start_server("--remote", "127.0.0.1:9", models=()) as alone:
        health = httpx2.get(f"{alone.url}/health", timeout=PATIENCE_S).json()
        assert health["ready"] is False and "cannot be reached" in health["reason"]
        assert (
            httpx2.post(f"{alone.url}/api/chat", json={"model": "x", "messages": HI}, timeout=PATIENCE_S).status_code
            == 502
        )
