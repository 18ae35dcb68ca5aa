"""OpenAI's responses, Anthropic's messages by its official client, and llama.cpp's routes."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.systems import ON_WINE
from tests.waiting import PATIENCE_S

MODEL = "stories260K-Q8_0"
GREEDY = {"temperature": 0}
LACKS = "Wine 8 lacks an option of sockets that Anthropic's client sets"
HELLO: list[Any] = [{"role": "user", "content": "Tell me of Tom."}]


@pytest.fixture
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    if ON_WINE:
        pytest.skip(LACKS)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_anthropic_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, messages=HELLO, max_tokens=10, extra_body=GREEDY, system="Be brief.")
    assert answer.role == "assistant" and answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 10
    assert answer.content[0].type == "text" and answer.content[0].text
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.").input_tokens
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_anthropic_stream_is_the_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=MODEL, messages=HELLO, max_tokens=12, extra_body=GREEDY)
    with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=12, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == "text" and text == whole.content[0].text
    assert final.usage.output_tokens == 12 and final.stop_reason == "max_tokens"


def test_anthropic_names_the_stop_sequence(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 40, "extra_body": GREEDY}
    (said,) = client.messages.create(**asked).content
    assert said.type == "text"
    word = said.text.split()[2]
    whole = client.messages.create(**asked, stop_sequences=["never said", word])
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", word)
    with client.messages.stream(**asked, stop_sequences=[word]) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", word)
    assert said.text.startswith(streamed.content[0].text) and word not in streamed.content[0].text


@pytest.mark.skipif(ON_WINE, reason=LACKS)
def test_anthropic_async(server: Any) -> None:
    async def ask() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client,
            client.messages.stream(model=MODEL, messages=HELLO, max_tokens=5, extra_body=GREEDY) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask())


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"messages": []},
        {"extra_body": {"temperature": -1}},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ],
)
def test_anthropic_errors(client: anthropic.Anthropic, changes: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 1, **changes})
    assert isinstance(caught.value.body, dict) and caught.value.body["error"]["type"] == "invalid_request_error"


def test_response_whole_and_streamed(server: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": MODEL, "input": "Tell me of Tom.", "temperature": 0, "max_output_tokens": 16}
        whole = client.responses.create(**asked)
        assert whole.output_text and whole.status == "incomplete"
        assert whole.usage and whole.usage.output_tokens == 16
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
        assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
        text = ""
        numbers = []
        for event in client.responses.create(**asked, stream=True):
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                text += event.delta
        assert text == whole.output_text and numbers == list(range(len(numbers)))
        with pytest.raises(openai.BadRequestError, match="not stored"):
            client.responses.create(**asked, previous_response_id="resp_1")


def test_tokens_there_and_back(server: Any) -> None:
    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(server.url + path, json={"model": MODEL, **body}, timeout=PATIENCE_S)

    # llama.cpp's ids for this text on this vocabulary
    tokens = post("/tokenize", content="Once upon a time", add_special=True).json()["tokens"]
    assert tokens == [1, 403, 407, 261, 378]
    assert post("/detokenize", tokens=tokens[1:]).json()["content"].strip() == "Once upon a time"
    pieces = post("/tokenize", content="Once upon", with_pieces=True).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces).strip() == "Once upon"
    assert post("/detokenize", tokens=[10**6]).status_code == 400
    assert "Tell me of Tom." in post("/apply-template", messages=HELLO).json()["prompt"]
    assert post("/infill", input_prefix="a", input_suffix="b").status_code == 400


def test_documented_routes_exist(server: Any) -> None:
    paths = httpx.get(server.url + "/openapi.json", timeout=PATIENCE_S).json()["paths"]
    assert {"/api/generate", "/v1/responses", "/v1/messages", "/infill", "/health", "/metrics"} <= set(paths)
    page = httpx.get(server.url + "/docs", timeout=PATIENCE_S)
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
