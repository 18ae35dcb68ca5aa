"""Images in tool results: kept for vision models, replaced by a note for others, and never an error."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.answer.placeholders import NOTE, without_images
from localllm.server.anthropic.requests import MessagesBody, messages_request
from localllm.server.bodies import OpenAIMessage
from localllm.server.contents import left_out, openai_message, with_few_images
from localllm.server.openai.items import conversation_of
from tests.fakes.scripted_model import write_scripted_model
from tests.localllm.server.conftest import StartServer
from tests.picture_files import png
from tests.waiting import PATIENCE_S

HI = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"name": "read", "description": "Read a file.", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def http(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    texts = {"plain": "It has been done.", "0": "It has been seen."}
    path: Path = write_scripted_model(tmp_path_factory.mktemp("scripted") / "scripted.gguf", texts)
    with (
        start_server("--model", str(path), models=()) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def posted(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json={"model": "scripted", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def _results_with(images: int, data: str) -> list[Any]:
    """A conversation in which a tool has sent this many images."""
    source = {"type": "base64", "media_type": "image/png", "data": data}
    messages = list(HI)
    for at in range(images):
        messages.append(
            {"role": "assistant", "content": [{"type": "tool_use", "id": f"t{at}", "name": "read", "input": {}}]}
        )
        content = [{"type": "text", "text": "Seen:"}, {"type": "image", "source": source}]
        messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{at}", "content": content}]}
        )
    return messages


def test_images_of_tools_are_kept_for_models_that_see(http: httpx.Client) -> None:

    picture = base64.b64encode(png(1)).decode()
    messages = _results_with(1, picture)
    found = messages_request(MessagesBody(model="m", max_tokens=9, messages=messages)).messages
    image = {"type": "image", "data": png(1), NOTE: left_out("image")}
    kept = [{"type": "text", "text": "Seen:"}, image]
    assert found[-1]["content"] == kept
    parts: list[Any] = [
        {"type": "text", "text": "Seen:"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    ]
    assert openai_message(OpenAIMessage(role="tool", tool_call_id="t", content=parts))["content"] == kept
    output = [
        {"type": "input_text", "text": "Seen:"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{picture}"},
    ]
    (result,) = conversation_of([{"type": "function_call_output", "call_id": "t", "output": output}])
    assert result["content"] == kept
    assert without_images(found)[-1]["content"] == f"Seen:\n{left_out('image')}"
    posted(http, "/v1/messages", max_tokens=9, messages=messages, tools=[READ])

    many = messages_request(MessagesBody(model="m", max_tokens=9, messages=_results_with(40, picture)))
    fewer = with_few_images(many).messages
    seen = [isinstance(message["content"], list) for message in fewer if message["role"] == "tool"]
    assert sum(seen) == 24 and seen == sorted(seen)
    more = messages_request(MessagesBody(model="m", max_tokens=9, messages=_results_with(41, picture)))
    assert with_few_images(more).messages[: len(fewer)] == fewer, "one more image changes nothing before it"
    posted(http, "/v1/messages", max_tokens=9, messages=_results_with(40, picture), tools=[READ])


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/messages/count_tokens", {}),
        ("/v1/chat/completions/input_tokens", {}),
        ("/apply-template", {}),
        ("/api/chat", {"_debug_render_only": True}),
    ],
)
def test_a_prompt_that_is_only_counted_or_shown_has_no_more_images_either(
    http: httpx.Client, path: str, more: dict[str, Any]
) -> None:
    picture = base64.b64encode(png(1)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    content: list[Any] = [{"type": "image", "source": source} if path.startswith("/v1/messages") else image]
    messages: list[Any] = [{"role": "user", "content": content * 33}]
    if path == "/api/chat":
        messages = [{"role": "user", "content": "Hi", "images": [picture] * 17}] * 2
    refused = http.post(path, json={"model": "scripted", "messages": messages, **more})
    assert refused.status_code == 400 and "at most 32 are allowed" in refused.text


@pytest.mark.parametrize("data", ["AA", "%%", base64.b64encode(b"GIF89a" + bytes(40)).decode()])
def test_unreadable_images_of_tools_are_not_errors(http: httpx.Client, data: str) -> None:
    posted(http, "/v1/messages", max_tokens=9, messages=_results_with(1, data), tools=[READ])
    url = {"type": "image_url", "image_url": {"url": f"data:image/gif;base64,{data}"}}
    call = {"id": "t", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": [url]},
    ]
    tools = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]
    posted(http, "/v1/chat/completions", messages=messages, tools=tools)
