"""Whole transcripts, to the byte but for ids, dates and times."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

MODEL = "stories260K-Q8_0"

GENERATE = """\
{"model":"stories260K-Q8_0","created_at":"T","response":",","done":false}
{"model":"stories260K-Q8_0","created_at":"T","response":" there","done":false}
{"model":"stories260K-Q8_0","created_at":"T","response":" was","done":false}
{"model":"stories260K-Q8_0","created_at":"T","response":"","context":[1,403,407,261,378,432,383,286],"done":true,\
"done_reason":"length","total_duration":N,"load_duration":N,"prompt_eval_count":5,"prompt_eval_cached_count":N,\
"prompt_eval_duration":N,"eval_count":3,"eval_duration":N}
"""

COMPLETION = """\
data: {"id":"I","object":"text_completion","created":N,"model":"stories260K-Q8_0","system_fingerprint":"fp_localllm",\
"choices":[{"text":", there","index":0,"logprobs":null,"finish_reason":null}]}

data: {"id":"I","object":"text_completion","created":N,"model":"stories260K-Q8_0","system_fingerprint":"fp_localllm",\
"choices":[{"text":"","index":0,"logprobs":null,"finish_reason":"length"}]}

data: [DONE]

"""

CHAT = """\
data: {"id":"I","object":"chat.completion.chunk","created":N,"model":"stories260K-Q8_0",\
"system_fingerprint":"fp_localllm","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,\
"finish_reason":null}]}

data: {"id":"I","object":"chat.completion.chunk","created":N,"model":"stories260K-Q8_0",\
"system_fingerprint":"fp_localllm","choices":[{"index":0,"delta":{"content":"TEXT"},"logprobs":null,\
"finish_reason":null}]}

data: {"id":"I","object":"chat.completion.chunk","created":N,"model":"stories260K-Q8_0",\
"system_fingerprint":"fp_localllm","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]}

data: {"id":"I","object":"chat.completion.chunk","created":N,"model":"stories260K-Q8_0",\
"system_fingerprint":"fp_localllm","choices":[],"usage":{"prompt_tokens":17,"completion_tokens":1,"total_tokens":18,\
"prompt_tokens_details":{"cached_tokens":N}}}

data: [DONE]

"""


def masked(text: str) -> str:
    text = re.sub(r'"created_at":"\d{4}-\d\d-\d\dT[\d:.]+Z"', '"created_at":"T"', text)
    text = re.sub(r'("(?:\w+_duration|prompt_eval_cached_count|created|cached_tokens)"):\d+', r"\1:N", text)
    return re.sub(r'"id":"(?:chatcmpl|cmpl)-[0-9a-f]{24}"', '"id":"I"', text)


def test_ndjson_of_generate(server: Any) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "options": {"temperature": 0, "num_predict": 3}}
    answer = httpx.post(server.url + "/api/generate", json=body, timeout=60)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in masked(answer.text).replace(":N", ":0").splitlines()]
    expected = [json.loads(line) for line in GENERATE.replace(":N", ":0").splitlines()]
    assert joined(lines, "response") == joined(expected, "response")
    assert list(lines[-1]) == list(expected[-1]) and lines[-1] == expected[-1]
    assert all(list(line) == list(expected[0]) for line in lines[:-1])


def joined(lines: list[dict[str, Any]], key: str) -> str:
    return "".join(line[key] for line in lines)


def test_events_of_completions(server: Any) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 2, "stream": True}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    # How tokens share events depends on time, what they say does not.
    one_event = re.sub(r'","index".*?\n\ndata: .*?"text":"(?= there)', "", masked(answer.text), flags=re.DOTALL)
    assert one_event == COMPLETION


def test_events_of_chat(server: Any) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = masked(httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).text)
    assert re.sub(r'"delta":{"content":"[^"]+"}', '"delta":{"content":"TEXT"}', answer) == CHAT


def test_errors_in_three_protocols(server: Any) -> None:
    def post(path: str) -> Any:
        return httpx.post(server.url + path, content=b"{").json()

    reason = "the body is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    assert post("/api/chat") == {"error": reason}
    openai = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
    assert post("/v1/chat/completions") == {"error": openai}
    assert post("/v1/messages") == {"type": "error", "error": {"type": "invalid_request_error", "message": reason}}


@pytest.fixture(scope="module")
def thinker(start_server: Any, model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of a model whose template knows tools and thinking. What it writes is nonsense."""
    import subprocess
    import sys

    template = TEMPLATE
    path = tmp_path_factory.mktemp("thinker") / "thinker.gguf"
    script = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template", template]
    subprocess.run([*script, str(model_files / f"{MODEL}.gguf"), str(path)], check=True, capture_output=True)
    with start_server("--model", str(path)) as server:
        yield server


# Qwen's, shortened to what this model's 512 tokens hold.
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["a", "b"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}


def test_tools_reach_the_prompt_and_calls_come_back(thinker: Any) -> None:
    import ollama
    import openai

    with ollama.Client(host=thinker.url) as client:
        assert {"completion", "tools", "thinking"} <= set(client.show("thinker").capabilities or [])
    # JSON allows blanks between its tokens, and this model would write little else.
    told = httpx.post(f"{thinker.url}/tokenize", json={"model": "thinker", "content": " \n\r\t"})
    blanks = [str(token) for token in told.json()["tokens"]] + ["35"]  # <0x20> too
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "thinker",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "seed": 1,
            "temperature": 0,
            "logit_bias": dict.fromkeys(blanks, -100),
        }
        choice = client.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        call = choice.message.tool_calls[0]
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments)["at"] in ("a", "b")
        chunks = list(client.chat.completions.create(**asked, stream=True))
        found = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
        assert found[0].function and found[0].function.arguments == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    prompt = httpx.post(
        f"{thinker.url}/apply-template",
        json={"model": "thinker", "messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]},
    ).json()["prompt"]
    assert '"name": "weather"' in prompt and prompt.endswith("<|im_start|>assistant\n")


def test_thinking_is_told_apart(thinker: Any) -> None:
    import ollama

    with ollama.Client(host=thinker.url) as client:
        messages = [{"role": "user", "content": "Hi"}]
        told = client.chat("thinker", messages, think=False, options={"seed": 1, "num_predict": 4})
        assert told.message.content and not told.message.thinking
        with pytest.raises(ollama.ResponseError, match="exclude each other"):
            client.chat("thinker", messages, think=True, format="json")
