"""Whole transcripts of chats in the other protocols, byte for byte except ids, dates, times and the token's text."""

import re
from typing import Any

import httpx

from tests.waiting import PATIENCE_S

MODEL = "stories260K-Q8_0"
HELLO = [{"role": "user", "content": "Hi"}]

OLLAMA = """\
{"model":"stories260K-Q8_0","created_at":"T","message":{"role":"assistant","content":"TEXT"},"done":false}
{"model":"stories260K-Q8_0","created_at":"T","message":{"role":"assistant","content":""},"done":true,\
"done_reason":"length","total_duration":N,"load_duration":N,"prompt_eval_count":17,"prompt_eval_cached_count":N,\
"prompt_eval_duration":N,"eval_count":1,"eval_duration":N}
"""

ANTHROPIC = """\
event: message_start
data: {"type":"message_start","message":{"id":"I","type":"message","role":"assistant","model":"stories260K-Q8_0",\
"content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":17,"output_tokens":0}}}

event: ping
data: {"type":"ping"}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"TEXT"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"max_tokens","stop_sequence":null},"usage":{"input_tokens":N,\
"cache_read_input_tokens":N,"cache_creation_input_tokens":0,\
"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":0},"output_tokens":1},"timings":T}

event: message_stop
data: {"type":"message_stop"}

"""

RESPONSES = """\
response.created response.in_progress response.output_item.added response.content_part.added \
response.output_text.delta response.output_text.done response.content_part.done response.output_item.done \
response.incomplete"""


def transcript(server: Any, path: str, **body: Any) -> str:
    """The server's output, with T, N, I and TEXT in place of what varies."""
    text = httpx.post(server.url + path, json={"model": MODEL, **body}, timeout=PATIENCE_S).text
    text = re.sub(r'"created_at":"\d{4}-\d\d-\d\dT[\d:.]+Z"', '"created_at":"T"', text)
    text = re.sub(r'("(?:\w+_duration|prompt_eval_cached_count|cache_read_input_tokens)"):\d+', r"\1:N", text)
    text = re.sub(r'("input_tokens"):\d+(,"cache_read)', r"\1:N\2", text)
    text = re.sub(r'"timings":\{"cache_n":[^}]+\}', '"timings":T', text)
    text = re.sub(r'("(?:content|text)":)"[^"]+"', r'\1"TEXT"', text)
    return re.sub(r'"id":"msg_[0-9a-f]{24}"', '"id":"I"', text)


def test_ndjson_of_chat(server: Any) -> None:
    assert transcript(server, "/api/chat", messages=HELLO, options={"temperature": 0, "num_predict": 1}) == OLLAMA


def test_an_answer_at_the_end_of_an_ollama_chat_is_continued(server: Any) -> None:
    def prompt_tokens(messages: list[dict[str, str]]) -> int:
        body = {"model": MODEL, "messages": messages, "stream": False, "options": {"num_predict": 1}}
        answer = httpx.post(server.url + "/api/chat", json=body, timeout=PATIENCE_S).json()
        return int(answer["prompt_eval_count"])

    begun = prompt_tokens([*HELLO, {"role": "assistant", "content": "Once"}])
    assert 17 < begun <= 17 + len(" Once")  # only the text, without markup of another turn
    assert prompt_tokens([*HELLO, {"role": "assistant", "content": "Once"}, *HELLO]) > begun + len("Once")


def test_events_of_messages(server: Any) -> None:
    asked = {"messages": HELLO, "temperature": 0, "max_tokens": 1, "stream": True}
    assert transcript(server, "/v1/messages", **asked) == ANTHROPIC


def test_events_of_responses(server: Any) -> None:
    body = {"model": MODEL, "input": "Hi", "temperature": 0, "max_output_tokens": 1, "stream": True}
    text = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE_S).text
    assert re.findall(r"^event: (\S+)\ndata: \{\"type\":\"\1\",\"sequence_number\":", text, re.M) == RESPONSES.split()
    assert text.endswith("}\n\n") and "[DONE]" not in text
