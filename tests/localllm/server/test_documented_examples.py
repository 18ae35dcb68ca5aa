"""The documented examples of OpenAI and of llama.cpp's server, one kind of request after the other.

OpenAI: https://platform.openai.com/docs and the README of its Python library, through that library. llama.cpp:
tools/server/README.md, as plain HTTP. Texts and names are our own.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.fakes.scripted_model import call, write_scripted_model
from tests.localllm.server.conftest import MODEL, Server, StartServer
from tests.waiting import PATIENCE_S

ASK = "How warm is it in Oslo?"
HI: Any = [{"role": "user", "content": ASK}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER, "strict": True},
}
FUNCTION: Any = {"type": "function", "name": "weather", "description": "Tell.", "parameters": WEATHER, "strict": True}
ANSWER = "It is four degrees in Oslo, and it rains."
SCRIPTS = {
    "plain": ANSWER,
    "0": call("weather", city="Oslo in the north", unit="C"),
    "1": ANSWER,
}


class Event(BaseModel):
    """A schema as in the examples of structured outputs."""

    kind: Literal["party", "fair"]
    days: list[Literal["Friday", "Saturday"]] = Field(max_length=2)


EVENT = Event.model_json_schema() | {"additionalProperties": False}


@pytest.fixture(scope="module")
def examples(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = write_scripted_model(tmp_path_factory.mktemp("scripted") / "scripted.gguf", SCRIPTS)
    with start_server("--model", str(path)) as server:
        yield server


@pytest.fixture(scope="module")
def gpt(examples: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{examples.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def a_response(gpt: OpenAI) -> None:
    response = gpt.responses.create(model="scripted", instructions="Be brief.", input=ASK)
    assert response.output_text == ANSWER and response.status == "completed" and response.usage is not None


def a_chat(gpt: OpenAI) -> None:
    messages: Any = [{"role": "developer", "content": "Be brief."}, *HI]
    completion = gpt.chat.completions.create(model="scripted", messages=messages)
    (choice,) = completion.choices
    assert choice.message.content == ANSWER and choice.finish_reason == "stop"


def a_streamed_response(gpt: OpenAI) -> None:
    events = list(gpt.responses.create(model="scripted", input=ASK, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))


def a_streamed_chat(gpt: OpenAI) -> None:
    chunks = list(
        gpt.chat.completions.create(model="scripted", messages=HI, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage is not None and chunks[-1].choices == [] and chunks[0].choices[0].delta.role == "assistant"


def a_helper_for_streams(gpt: OpenAI) -> None:
    with gpt.chat.completions.stream(model="scripted", messages=HI) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds and final.choices[0].message.content == ANSWER


def several_clients_at_once(gpt: OpenAI) -> None:
    async def asked() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=str(gpt.base_url), api_key="none", max_retries=0) as client:
            answers = [client.chat.completions.create(model="scripted", messages=HI) for _ in range(3)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*answers)]

    assert asyncio.run(asked()) == [ANSWER] * 3


def a_conversation_that_goes_on(gpt: OpenAI) -> None:
    first = gpt.responses.create(model="scripted", input=ASK, store=True)
    second = gpt.responses.create(model="scripted", input="And tomorrow?", previous_response_id=first.id)
    assert second.previous_response_id == first.id and first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def structured_outputs(gpt: OpenAI) -> None:
    chat = gpt.chat.completions.parse(model=MODEL, messages=HI, response_format=Event, max_tokens=400)
    assert isinstance(chat.choices[0].message.parsed, Event)
    response = gpt.responses.parse(model=MODEL, input=ASK, text_format=Event, max_output_tokens=400)
    assert isinstance(response.output_parsed, Event)
    wanted: Any = {"type": "json_schema", "name": "event", "schema": EVENT, "strict": True}
    plain = gpt.responses.create(model=MODEL, input=ASK, text={"format": wanted}, max_output_tokens=400)
    Event.model_validate_json(plain.output_text)


def json_mode(gpt: OpenAI) -> None:
    wanted: Any = {"type": "json_object"}
    chat = gpt.chat.completions.create(model=MODEL, messages=HI, response_format=wanted, max_tokens=400, seed=1)
    if chat.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(chat.choices[0].message.content or ""), dict)


def function_calling(gpt: OpenAI) -> None:
    messages = list(HI)
    (choice,) = gpt.chat.completions.create(model="scripted", messages=messages, tools=[TOOL]).choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    (tool_call,) = choice.message.tool_calls
    assert tool_call.type == "function"
    assert json.loads(tool_call.function.arguments) == {"city": "Oslo in the north", "unit": "C"}
    messages += [choice.message, {"role": "tool", "tool_call_id": tool_call.id, "content": "4"}]
    answer = gpt.chat.completions.create(model="scripted", messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == ANSWER


def function_calling_in_responses(gpt: OpenAI) -> None:
    items: list[Any] = [*HI]
    response = gpt.responses.create(model="scripted", input=items, tools=[FUNCTION])
    (item,) = response.output
    assert item.type == "function_call" and json.loads(item.arguments)["unit"] == "C"
    items += [item, {"type": "function_call_output", "call_id": item.call_id, "output": "4"}]
    assert gpt.responses.create(model="scripted", input=items, tools=[FUNCTION]).output_text == ANSWER


def streamed_function_calls(gpt: OpenAI) -> None:
    chunks = gpt.chat.completions.create(model="scripted", messages=HI, tools=[TOOL], stream=True)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].id and deltas[0].function and deltas[0].function.name == "weather"
    written = "".join(delta.function.arguments or "" for delta in deltas if delta.function)
    assert json.loads(written)["city"] == "Oslo in the north"
    events = list(gpt.responses.create(model="scripted", input=ASK, tools=[FUNCTION], stream=True))
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert json.loads(done.arguments)["unit"] == "C"


def a_tool_that_must_be_called(gpt: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        chat = gpt.chat.completions.create(
            model="scripted", messages=HI, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=300
        )
        calls = chat.choices[0].message.tool_calls
        assert calls and calls[0].type == "function" and calls[0].function.name == "weather"
    none = gpt.chat.completions.create(model="scripted", messages=HI, tools=[TOOL], tool_choice="none")
    assert none.choices[0].message.content == ANSWER


def sampling_and_limits(gpt: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "seed": 5, "temperature": 0.7, "top_p": 0.9}
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"50": -100}}
    first, second = (gpt.chat.completions.create(**asked, **penalties, max_completion_tokens=6, n=2) for _ in range(2))
    assert [one.message.content for one in first.choices] == [one.message.content for one in second.choices]
    assert len(first.choices) == 2 and first.choices[0].finish_reason == "length"
    assert first.usage is not None and first.usage.completion_tokens == 12


def log_probabilities(gpt: OpenAI) -> None:
    chat = gpt.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2, max_tokens=3)
    found = chat.choices[0].logprobs
    assert found is not None and found.content is not None and len(found.content) == 3
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in found.content)


def completions(gpt: OpenAI) -> None:
    one = gpt.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=5, temperature=0)
    assert one.object == "text_completion" and one.choices[0].text
    two = gpt.completions.create(model=MODEL, prompt=["Once upon a time"] * 2, max_tokens=5, temperature=0)
    assert [choice.text for choice in two.choices] == [one.choices[0].text] * 2
    chunks = list(
        gpt.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=5, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == one.choices[0].text


def embeddings(gpt: OpenAI) -> None:
    both = [
        gpt.embeddings.create(model=MODEL, input=["a dog", "a cat"], encoding_format=encoding)
        for encoding in ("float", "base64")  # the library's default is base64
    ]
    plain = gpt.embeddings.create(model=MODEL, input=["a dog", "a cat"])
    assert [row.index for row in plain.data] == [0, 1] and plain.usage.total_tokens > 0
    assert plain.data[1].embedding == pytest.approx(both[0].data[1].embedding)


def models(gpt: OpenAI) -> None:
    listed = [model.id for model in gpt.models.list()]
    assert {"scripted", MODEL} <= set(listed) and gpt.models.retrieve(MODEL).id == MODEL


def images_in_each_form(gpt: OpenAI) -> None:
    """URLs are never fetched, and no model here has vision: only the error messages are checked."""
    address = "https://example.org/a.png"
    for url, said in ((address, "does not fetch"), ("data:image/png;base64,AA", "image")):
        parts: Any = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
        with pytest.raises(openai.BadRequestError, match=said):
            gpt.chat.completions.create(model="scripted", messages=[{"role": "user", "content": parts}])
        items: Any = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": url}]
        with pytest.raises(openai.BadRequestError, match=said):
            gpt.responses.create(model="scripted", input=[{"role": "user", "content": items}])


def raw_responses_and_headers(gpt: OpenAI) -> None:
    raw = gpt.chat.completions.with_raw_response.create(model="scripted", messages=HI)
    assert raw.status_code == 200 and raw.parse().choices[0].message.content == ANSWER
    with gpt.chat.completions.with_streaming_response.create(model="scripted", messages=HI) as streamed:
        assert streamed.headers["content-type"] == "application/json"
    extra = gpt.chat.completions.create(
        model="scripted", messages=HI, extra_body={"top_k": 1}, extra_headers={"X-A": "b"}
    )
    assert extra.choices[0].message.content == ANSWER


def errors(gpt: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        gpt.chat.completions.create(model="no-such-model", messages=HI)
    assert unknown.value.status_code == 404 and unknown.value.body is not None
    with pytest.raises(openai.BadRequestError):
        gpt.chat.completions.create(model="scripted", messages=[])
    with pytest.raises(openai.NotFoundError):
        gpt.moderations.create(input="x")


def reasoning(gpt: OpenAI) -> None:
    """For responses, a reasoning request that this model cannot fulfil is ignored; a chat's is refused."""
    response = gpt.responses.create(model="scripted", input=ASK, reasoning={"effort": "low", "summary": "auto"})
    assert response.output_text.endswith(ANSWER)


def counted_tokens(gpt: OpenAI) -> None:
    counted = gpt.responses.input_tokens.count(model="scripted", input=ASK)
    used = gpt.responses.create(model="scripted", input=ASK).usage
    assert used is not None and counted.input_tokens == used.input_tokens


OPENAI: list[Callable[[OpenAI], None]] = [
    a_response,
    a_chat,
    a_streamed_response,
    a_streamed_chat,
    a_helper_for_streams,
    several_clients_at_once,
    a_conversation_that_goes_on,
    structured_outputs,
    json_mode,
    function_calling,
    function_calling_in_responses,
    streamed_function_calls,
    a_tool_that_must_be_called,
    sampling_and_limits,
    log_probabilities,
    completions,
    embeddings,
    models,
    images_in_each_form,
    raw_responses_and_headers,
    errors,
    reasoning,
    counted_tokens,
]


@pytest.mark.parametrize("example", OPENAI, ids=lambda example: example.__name__)
def test_openai(gpt: OpenAI, example: Callable[[OpenAI], None]) -> None:
    example(gpt)


STORY = "Once upon a time"
CHAT = {"model": "scripted", "messages": [{"role": "system", "content": "Be brief."}, *HI]}
# A path, a body (None for GET), and what the answer must contain.
LLAMA_CPP: list[tuple[str, Any, Callable[[Any], object]]] = [
    ("/health", None, lambda told: told["status"] == "ok"),
    ("/completion", {"prompt": STORY, "n_predict": 8}, lambda told: told["content"] and told["stop"] is True),
    ("/completion", {"prompt": [STORY, STORY], "n_predict": 2}, lambda told: len(told) == 2),
    ("/completion", {"prompt": [1, 403, STORY], "n_predict": 2}, lambda told: told["tokens_predicted"] == 2),
    ("/completion", {"prompt": STORY, "n_predict": 0}, lambda told: told["content"] == ""),
    (
        "/completion",
        {
            "prompt": STORY,
            "n_predict": 60,
            "json_schema": {"items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3},
        },
        lambda told: 2 <= len(json.loads(told["content"])) <= 3,
    ),
    (
        "/completion",
        {"prompt": STORY, "n_predict": 9, "grammar": 'root ::= "a" | "b"'},
        lambda told: told["content"] in "ab",
    ),
    ("/completion", {"prompt": STORY, "n_predict": 2, "logit_bias": [[50, False]]}, lambda told: told["content"]),
    (
        "/completion",
        {"prompt": STORY, "n_predict": 2, "n_probs": 3},
        lambda told: len(told["completion_probabilities"]) == 2,
    ),
    (
        "/completion",
        {"prompt": STORY, "n_predict": 2, "response_fields": ["content"]},
        lambda told: [*told] == ["content"],
    ),
    (
        "/tokenize",
        {"content": STORY, "add_special": True, "with_pieces": True},
        lambda told: "piece" in told["tokens"][0],
    ),
    ("/detokenize", {"tokens": [403, 407]}, lambda told: isinstance(told["content"], str)),
    ("/apply-template", {"messages": HI}, lambda told: ASK in told["prompt"]),
    ("/embedding", {"content": "a dog"}, lambda told: len(told[0]["embedding"][0]) > 8),
    ("/props", None, lambda told: {"default_generation_settings", "total_slots", "chat_template"} <= told.keys()),
    ("/slots", None, lambda told: {"id", "n_ctx", "is_processing"} <= told[0].keys()),
    ("/v1/models", None, lambda told: told["object"] == "list" and told["data"][0]["id"]),
    ("/v1/completions", {"prompt": STORY, "max_tokens": 3}, lambda told: told["usage"]["completion_tokens"] == 3),
    ("/v1/chat/completions", CHAT, lambda told: told["choices"][0]["message"]["content"] == ANSWER),
    (
        "/v1/chat/completions",
        {"messages": HI, "response_format": {"type": "json_object", "schema": {"const": {"a": 1}}}},
        lambda told: json.loads(told["choices"][0]["message"]["content"]) == {"a": 1},
    ),
    (
        "/v1/chat/completions",
        {"messages": HI, "response_format": {"type": "json_schema", "schema": {"const": [1]}}},
        lambda told: json.loads(told["choices"][0]["message"]["content"]) == [1],
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "chat_template_kwargs": {"enable_thinking": False}},
        lambda told: told["choices"],
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL]},
        lambda told: told["choices"][0]["finish_reason"] == "tool_calls",
    ),
    ("/v1/chat/completions/input_tokens", CHAT, lambda told: told["input_tokens"] > 5),
    ("/v1/responses", {"model": "scripted", "instructions": "Be brief.", "input": ASK}, lambda told: told["output"]),
    ("/v1/responses/input_tokens", {"input": ASK}, lambda told: told["input_tokens"] > 5),
    ("/v1/embeddings", {"input": "a dog", "encoding_format": "float"}, lambda told: told["data"][0]["embedding"]),
    ("/v1/embeddings", {"input": ["a dog", "a cat"]}, lambda told: len(told["data"]) == 2),
    (
        "/v1/messages",
        {"model": "scripted", "max_tokens": 64, "system": "Be brief.", "messages": HI},
        lambda told: told["content"][0]["text"] == ANSWER and told["stop_reason"] == "end_turn",
    ),
    ("/v1/messages/count_tokens", {"model": "scripted", "messages": HI}, lambda told: told["input_tokens"] > 5),
]


@pytest.mark.parametrize(("path", "body", "is_right"), LLAMA_CPP)
def test_llama_cpp(examples: Server, path: str, body: Any, is_right: Callable[[Any], object]) -> None:
    if body is None:
        answer = httpx.get(f"{examples.url}{path}", params={"model": MODEL}, timeout=PATIENCE_S)
    else:
        answer = httpx.post(f"{examples.url}{path}", json={"model": MODEL, **body}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert is_right(answer.json()), answer.text


def test_metrics_of_the_examples(examples: Server) -> None:
    told = httpx.get(f"{examples.url}/metrics", timeout=PATIENCE_S).text
    assert "localllm_prompt_tokens_total" in told and "localllm_requests_total" in told
