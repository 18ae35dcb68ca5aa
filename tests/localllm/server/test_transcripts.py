"""Whole transcripts, byte for byte except ids, dates and times."""

import json
import re
from typing import Any

import httpx

from tests.waiting import PATIENCE_S

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
"choices":[{"text":"","index":0,"logprobs":null,"finish_reason":"length"}],"timings":T}

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
"prompt_tokens_details":{"cached_tokens":N}},"timings":T}

data: [DONE]

"""


def masked(text: str) -> str:
    text = re.sub(r'"created_at":"\d{4}-\d\d-\d\dT[\d:.]+Z"', '"created_at":"T"', text)
    text = re.sub(r'("(?:\w+_duration|prompt_eval_cached_count|created|cached_tokens)"):\d+', r"\1:N", text)
    text = re.sub(r'"timings":\{[^}]*\}', '"timings":T', text)
    return re.sub(r'"id":"(?:chatcmpl|cmpl)-[0-9a-f]{24}"', '"id":"I"', text)


def test_ndjson_of_generate(server: Any) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "options": {"temperature": 0, "num_predict": 3}}
    answer = httpx.post(server.url + "/api/generate", json=body, timeout=PATIENCE_S)
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
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.headers["content-type"].startswith("text/event-stream")
    # How tokens are grouped into events depends on time; their content does not.
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
    answer = masked(httpx.post(server.url + "/v1/chat/completions", json=body, timeout=PATIENCE_S).text)
    assert re.sub(r'"delta":{"content":"[^"]+"}', '"delta":{"content":"TEXT"}', answer) == CHAT


def test_errors_in_three_protocols(server: Any) -> None:
    def post(path: str) -> Any:
        return httpx.post(server.url + path, content=b"{", timeout=PATIENCE_S).json()

    reason = "the body is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    assert post("/api/chat") == {"error": reason}
    openai = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
    assert post("/v1/chat/completions") == {"error": openai}
    claude = post("/v1/messages")
    assert claude.pop("request_id").startswith("req_")
    assert claude == {"type": "error", "error": {"type": "invalid_request_error", "message": reason}}
