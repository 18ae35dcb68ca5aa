"""cache_control, prompt_cache_key and prompt_cache_retention pin prompts, and usage tells what was written and read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from localllm.server.anthropic.requests import MessagesBody, messages_request
from localllm.server.bodies import LONG_RETENTION_S, RETENTION_S
from localllm.server.openai.chat import chat_request
from localllm.server.openai.schema import ChatBody
from tests.localllm.server.conftest import StartServer
from tests.waiting import PATIENCE_S

EPHEMERAL = {"type": "ephemeral"}
BOOK = "The bridge was built by a patient company of ants. " * 12


@pytest.fixture(scope="module")
def http(start_server: StartServer) -> Iterator[httpx.Client]:
    with start_server() as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def asked(http: httpx.Client, **fields: Any) -> dict[str, int]:
    answer = http.post("/v1/messages", json={"model": "builtin", "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    parts = usage.pop("cache_creation")
    assert parts.keys() == {"ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens"}
    assert sum(parts.values()) == usage["cache_creation_input_tokens"]
    return usage


def test_usage_tells_what_was_written_and_read(http: httpx.Client) -> None:
    def about(question: str, **control: Any) -> list[Any]:
        return [{"role": "user", "content": [block(BOOK, **control), block(question)]}]

    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    first = asked(http, messages=about("Who built it?", **marked))
    assert first["cache_creation_input_tokens"] > 100 and first["cache_read_input_tokens"] < 20
    assert 0 < first["input_tokens"] < 40
    again = asked(http, messages=about("When was that?", **marked))
    assert again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]
    assert sum(asked(http, messages=about("When was that?")).values()) == sum(again.values())


def test_usage_tells_for_how_long(http: httpx.Client) -> None:
    hour, minutes = ({"cache_control": {"type": "ephemeral", "ttl": ttl}} for ttl in ("1h", "5m"))
    content = [block(f"Long: {BOOK}", **hour), block("And this chapter, too.", **minutes), block("Who?")]
    with anthropic.Anthropic(base_url=str(http.base_url), api_key="none", max_retries=0) as claude:
        asked_for: Any = {"model": "builtin", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
        parts = claude.messages.create(**asked_for).usage.cache_creation
        assert parts and parts.ephemeral_1h_input_tokens > 100 > parts.ephemeral_5m_input_tokens > 5
        with claude.messages.stream(**asked_for) as stream:
            told = [event.usage for event in stream if event.type == "message_delta"]
    assert told[0].to_dict()["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}


def test_the_last_block_and_the_whole_request_pin_everything(http: httpx.Client) -> None:
    for number, fields in enumerate(({"cache_control": EPHEMERAL}, {})):
        control = {} if fields else {"cache_control": EPHEMERAL}
        content = [block(f"{number} {BOOK}"), block("Why?", **control)]
        usage = asked(http, messages=[{"role": "user", "content": content}], **fields)
        assert usage["input_tokens"] == 0 and usage["cache_creation_input_tokens"] > 100


def test_streams_tell_it_too(http: httpx.Client) -> None:
    body = {
        "model": "builtin",
        "max_tokens": 2,
        "stream": True,
        "cache_control": EPHEMERAL,
        "messages": [{"role": "user", "content": f"Stream: {BOOK}"}],
    }
    text = http.post("/v1/messages", json=body).text
    assert '"cache_creation_input_tokens":0' not in text and '"cache_creation_input_tokens":' in text


def test_a_pin_outlasts_the_server(start_server: StartServer, tmp_path: Path) -> None:
    text = "Outlasting. " + 4 * BOOK
    usages = []
    for question in ("Who?", "When?"):
        with start_server(XDG_CACHE_HOME=str(tmp_path)) as server, httpx.Client(base_url=server.url) as client:
            content = [block(text, cache_control=EPHEMERAL), block(question)]
            client.timeout = PATIENCE_S
            usages.append(asked(client, messages=[{"role": "user", "content": content}]))
        assert len(list(tmp_path.glob("localllm/kv/*/*.pin"))) == 1
    assert usages[0]["cache_read_input_tokens"] < 20
    assert usages[1]["cache_read_input_tokens"] >= usages[0]["cache_creation_input_tokens"] - 256


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize("fields", [{"prompt_cache_key": "me"}, {"prompt_cache_retention": "24h"}])
def test_openais_fields_pin_the_prompt(http: httpx.Client, route: str, fields: dict[str, str]) -> None:
    text = f"{route} {fields} {BOOK}"
    prompt: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
        "/v1/responses": {"input": text, "max_output_tokens": 2},
        "/v1/completions": {"prompt": text, "max_tokens": 2},
    }[route]
    usages = [http.post(route, json={"model": "builtin", **prompt, **more}).json()["usage"] for more in (fields, {})]
    details = [usage.get("prompt_tokens_details") or usage["input_tokens_details"] for usage in usages]
    total = usages[0].get("prompt_tokens") or usages[0]["input_tokens"]
    assert details[0]["cache_write_tokens"] + details[0]["cached_tokens"] == total
    assert details[1]["cached_tokens"] == total - 1 and "cache_write_tokens" not in details[1]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "ttl must be 5m or 1h"),
        ({"cache_control": {"type": "permanent"}}, 'type "ephemeral"'),
        ({"system": [block("Be brief.", cache_control=7)]}, "cache_control must be an object"),
        (
            {"system": [block("x", cache_control=EPHEMERAL)] * 3 + [block("y", cache_control=EPHEMERAL)] * 2},
            "at most 4",
        ),
    ],
)
def test_a_wrong_cache_control_is_refused(http: httpx.Client, fields: dict[str, Any], told: str) -> None:
    body = {"model": "builtin", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}], **fields}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]


def test_times_and_parts_of_each_protocol() -> None:
    messages = [
        {"role": "user", "content": [block("one", cache_control=EPHEMERAL), block("two")]},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    body = MessagesBody.model_validate(
        {
            "max_tokens": 1,
            "system": [block("Be brief.", cache_control={"type": "ephemeral", "ttl": "1h"})],
            "messages": messages,
        }
    )
    found = [(pin.seconds, [one["content"] for one in pin.messages or ()]) for pin in messages_request(body).pins]
    assert found == [(3600.0, ["Be brief."]), (300.0, ["Be brief.", "one"])]
    for given, seconds in (
        ({}, []),
        ({"prompt_cache_key": "k"}, [RETENTION_S]),
        ({"prompt_cache_retention": "in_memory"}, [RETENTION_S]),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, [LONG_RETENTION_S]),
    ):
        request = chat_request(ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi"}], **given}))
        assert [pin.seconds for pin in request.pins] == seconds
