"""The official asynchronous clients use every route: the answers equal those of the synchronous clients."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.oracle import llama_oracle

MODEL, OTHER = "stories260K-Q8_0", "tinystories656K-Q8_0"
HELLO: list[Any] = [{"role": "user", "content": "Tell me of Tom."}]
GREEDY = {"temperature": 0, "num_predict": 8}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def library(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with start_server(LOCALLLM_MODEL_STORE=str(tmp_path_factory.mktemp("store"))) as server:
        yield server


def test_ollama_answers(server: Any) -> None:
    with ollama.Client(host=server.url) as client:
        generated = client.generate(MODEL, PROMPT, options=GREEDY).response
        chatted = client.chat(MODEL, HELLO, options=GREEDY).message.content

    async def ask() -> None:
        async with ollama.AsyncClient(host=server.url) as client:
            assert (await client.generate(MODEL, PROMPT, options=GREEDY)).response == generated
            assert (await client.chat(MODEL, HELLO, options=GREEDY)).message.content == chatted
            pieces = await client.chat(MODEL, HELLO, options=GREEDY, stream=True)
            assert "".join([piece.message.content or "" async for piece in pieces]) == chatted
            assert MODEL in {model.model for model in (await client.list()).models}
            assert MODEL in {model.model for model in (await client.ps()).models}
            assert (await client.show(MODEL)).capabilities == ["completion"]
            with pytest.raises(ollama.ResponseError, match="not found"):
                await client.chat("nobody", HELLO)

    asyncio.run(ask())


def test_ollama_library(library: Any, model_files: Path) -> None:
    async def ask() -> None:
        async with ollama.AsyncClient(host=library.url) as client:
            digest = await client.create_blob(model_files / f"{MODEL}.gguf")
            assert (await client.create("mine", files={"m.gguf": digest})).status == "success"
            told = [line async for line in await client.create("ours", from_="mine", system="Hi.", stream=True)]
            assert told[-1].status == "success"
            assert (await client.copy("ours", "yours")).status == "success"
            assert {"mine:latest", "ours:latest", "yours:latest"} <= {m.model for m in (await client.list()).models}
            assert (await client.generate("yours", PROMPT, raw=True, options=GREEDY)).response
            for name in ("mine", "ours", "yours"):
                assert (await client.delete(name)).status == "success"
            with pytest.raises(ollama.ResponseError) as pushed:
                await client.push("mine")
            assert pushed.value.status_code == 404
            with pytest.raises(ollama.ResponseError) as pulled:
                await client.pull("127.0.0.1:1/a/b")
            assert pulled.value.status_code == 400

    asyncio.run(ask())
    with ollama.Client(host=library.url) as client:
        assert not any("mine" in (model.model or "") for model in client.list().models)
        with pytest.raises(ollama.ResponseError, match="not found"):
            client.push(MODEL)
        with pytest.raises(ollama.ResponseError, match="not found"):
            list(client.push(MODEL, stream=True))


def test_openai(server: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chatted = client.chat.completions.create(messages=HELLO, max_tokens=8, **asked).choices[0].message.content
        continued = client.completions.create(prompt=PROMPT, max_tokens=8, **asked).choices[0].text
        responded = client.responses.create(input="Tell me of Tom.", max_output_tokens=16, **asked).output_text

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert MODEL in [model.id async for model in await client.models.list()]
            assert (await client.models.retrieve(MODEL)).id == MODEL
            chat = await client.chat.completions.create(messages=HELLO, max_tokens=8, **asked)
            assert chat.choices[0].message.content == chatted
            whole = await client.completions.create(prompt=PROMPT, max_tokens=8, **asked)
            assert whole.choices[0].text == continued
            chunks = await client.completions.create(prompt=PROMPT, max_tokens=8, stream=True, **asked)
            assert "".join([choice.text async for chunk in chunks for choice in chunk.choices]) == continued
            response = await client.responses.create(input="Tell me of Tom.", max_output_tokens=16, **asked)
            assert response.output_text == responded
            events = await client.responses.create(input="Tell me of Tom.", max_output_tokens=16, stream=True, **asked)
            deltas = [event.delta async for event in events if event.type == "response.output_text.delta"]
            assert "".join(deltas) == responded

    asyncio.run(ask())


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_vectors(server: Any) -> None:
    with ollama.Client(host=server.url) as client:
        expected = client.embed(MODEL, [PROMPT]).embeddings

    async def ask() -> None:
        async with ollama.AsyncClient(host=server.url) as client:
            assert (await client.embed(MODEL, [PROMPT])).embeddings == expected
            assert (await client.embeddings(MODEL, PROMPT)).embedding == expected[0]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            told = await client.embeddings.create(model=MODEL, input=PROMPT, encoding_format="float")
            assert told.data[0].embedding == pytest.approx(expected[0], abs=1e-6)

    asyncio.run(ask())


def test_anthropic(server: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        greedy = asked | {"max_tokens": 8, "extra_body": {"temperature": 0}}
        (said,) = client.messages.create(**greedy).content
        counted = client.messages.count_tokens(**asked).input_tokens
        events = list(client.messages.create(**greedy, stream=True))
        assert events[0].type == "message_start" and events[-1].type == "message_stop"

    async def ask() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            assert (await client.messages.create(**greedy)).content == [said]
            assert (await client.messages.count_tokens(**asked)).input_tokens == counted
            streamed = await client.messages.create(**greedy, stream=True)
            deltas = [event.delta async for event in streamed if event.type == "content_block_delta"]
            assert "".join(delta.text for delta in deltas) == said.text

    asyncio.run(ask())
