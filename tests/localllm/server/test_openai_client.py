"""The official openai client drives a real server."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

MODEL = "stories260K-Q8_0"
HELLO: list[Any] = [{"role": "user", "content": "Tell me of Tom."}]


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert MODEL in {model.id for model in client.models.list()}
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=12)
    choice = whole.choices[0]
    assert choice.finish_reason == "length" and choice.message.content and choice.message.role == "assistant"
    assert whole.usage and whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    last = chunks[-1].usage
    assert last and last.completion_tokens == 12 and last.prompt_tokens == whole.usage.prompt_tokens
    assert last.prompt_tokens_details and last.prompt_tokens_details.cached_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_choices_are_seeded_one_by_one(client: openai.OpenAI) -> None:
    def ask(stream: bool) -> Any:
        return client.chat.completions.create(
            model=MODEL, messages=HELLO, n=3, seed=7, max_tokens=8, stream=stream, temperature=1
        )

    whole = [choice.message.content for choice in ask(False).choices]
    assert len(set(whole)) == 3
    streamed = ["", "", ""]
    for chunk in ask(True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == whole


def test_stop_bias_and_logprobs(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=10, logprobs=2)
    assert plain.choices[0].text == ", there was a little girl named Lily"
    logprobs = plain.choices[0].logprobs
    assert logprobs and logprobs.tokens and "".join(logprobs.tokens) == plain.choices[0].text
    assert logprobs.top_logprobs and len(logprobs.top_logprobs[0]) == 2
    stopped = client.completions.create(
        model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=10, stop=["little", "Lily"]
    )
    assert stopped.choices[0].text == ", there was a " and stopped.choices[0].finish_reason == "stop"
    biased = client.completions.create(
        model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=1, logit_bias={"432": -100}
    )
    assert biased.choices[0].text != plain.choices[0].text[:1]


def test_completions_of_token_lists_and_echo(client: openai.OpenAI) -> None:
    ids = [1, 403, 407, 261, 378]
    found = client.completions.create(model=MODEL, prompt=[ids, ids], temperature=0, max_tokens=4, echo=True)
    assert [choice.text for choice in found.choices] == [found.choices[0].text] * 2
    assert found.choices[0].text.strip().startswith("Once upon a time, there was a")
    assert found.usage and found.usage.prompt_tokens == 10 and found.usage.completion_tokens == 8
    streamed = client.completions.create(model=MODEL, prompt=[ids, ids], temperature=0, max_tokens=4, stream=True)
    texts = ["", ""]
    for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [", there was a"] * 2


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Tom", "Lily"]}},
        "required": ["name"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        seed=1,
        max_tokens=100,
        logit_bias={},
        response_format={"type": "json_schema", "json_schema": {"name": "who", "schema": schema}},
    )
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert json.loads(answer.choices[0].message.content or "")["name"] in ("Tom", "Lily")


def test_async_streams_and_leaving_early(server: Any) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=HELLO, seed=1, max_tokens=20, stream=True
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                if len(text) > 3:
                    break
            await stream.close()
            return text

    async def both() -> list[str]:
        return await asyncio.gather(ask(), ask())

    shorter, longer = sorted(asyncio.run(both()), key=len)
    assert shorter and longer.startswith(shorter)  # an event holds as many tokens as are ready when it is sent


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 10**9}, "n:"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "does not fetch images",
        ),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_schema"}}, "schema"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "does not support tools"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"extra_body": {"num_ctx": 4}}, "context"),
    ],
)
def test_bad_requests(client: openai.OpenAI, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 1, **changes})
    assert words in caught.value.message
    assert isinstance(caught.value.body, dict) and caught.value.body["type"] == "invalid_request_error"


def test_missing_model_is_openais_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert isinstance(caught.value.body, dict) and caught.value.body["type"] == "not_found_error"


@pytest.mark.parametrize("text", ["é", "\N{FOX FACE}", 'a "b" \\ c\n'])
def test_choices_in_any_script(client: openai.OpenAI, text: str) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], extra_body={"guided_choice": [text]}
    )
    assert answer.choices[0].message.content == text
