"""The official ollama client drives a real server."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.waiting import PATIENCE_S

MODEL, OTHER = "stories260K-Q8_0", "tinystories656K-Q8_0"
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture
def client(server: Any) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


def test_generate_is_the_reference_text(client: ollama.Client, data_dir: Path) -> None:
    golden = json.loads((data_dir / "models" / "golden.json").read_text(encoding="utf-8"))
    expected = golden["karpathy_expected_stdout_260K_200steps"]
    answer = client.generate(MODEL, "Once upon a time", options={"temperature": 0, "num_predict": 20})
    assert answer.response and expected.startswith("Once upon a time" + answer.response)
    assert answer.done and answer.done_reason == "length"
    assert answer.prompt_eval_count == 5 and answer.eval_count == 20
    assert min(answer.total_duration or 0, answer.prompt_eval_duration or 0, answer.eval_duration or 0) > 0
    assert answer.context and len(answer.context) == 25


def test_streamed_pieces_are_the_whole(client: ollama.Client) -> None:
    whole = client.generate(MODEL, "Once upon a time", options=GREEDY)
    pieces = list(client.generate(MODEL, "Once upon a time", options=GREEDY, stream=True))
    assert "".join(piece.response for piece in pieces) == whole.response
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_context_continues_where_it_ended(client: ollama.Client) -> None:
    long = client.generate(MODEL, "Once upon a time", raw=False, options={"temperature": 0, "num_predict": 16})
    first = client.generate(MODEL, "Once upon a time", options={"temperature": 0, "num_predict": 8})
    second = client.generate(MODEL, "", context=first.context, options={"temperature": 0, "num_predict": 8})
    assert first.response + second.response == long.response


def test_chat_streams(client: ollama.Client) -> None:
    messages = [{"role": "user", "content": "Tell me of Tom."}]
    whole = client.chat(MODEL, messages, options=GREEDY)
    assert whole.message.role == "assistant" and whole.message.content
    pieces = list(client.chat(MODEL, messages, options=GREEDY, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content


def test_async_client_at_the_same_time(server: Any) -> None:
    async def ask(seed: int) -> str:
        text = ""
        options = {"seed": seed, "num_predict": 10}
        async with ollama.AsyncClient(host=server.url) as client:
            async for piece in await client.generate(MODEL, "One day", options=options, stream=True):
                text += piece.response
        return text

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(ask(seed % 3) for seed in range(6)))

    answers = asyncio.run(ask_all())
    assert answers[:3] == answers[3:] and len(set(answers)) == 3


def test_format_keeps_to_a_schema(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    schema["additionalProperties"] = False
    answer = client.generate(MODEL, "Tom", format=schema, options={"seed": 3, "num_predict": 200})
    if answer.done_reason == "stop":
        assert isinstance(json.loads(answer.response)["age"], int)
    assert answer.response.lstrip().startswith("{")


def test_logprobs_name_the_tokens(client: ollama.Client) -> None:
    answer = client.generate(MODEL, "Once upon a time", options=GREEDY, logprobs=True, top_logprobs=2)
    assert answer.logprobs and len(answer.logprobs) == 12
    first = answer.logprobs[0]
    assert first.top_logprobs and first.top_logprobs[0].token == first.token and first.logprob <= 0
    assert "".join(entry.token for entry in answer.logprobs) == answer.response


def test_lists_and_details(client: ollama.Client) -> None:
    assert {MODEL, OTHER} <= {model.model for model in client.list().models}
    details = client.show(MODEL)
    assert details.details and details.details.quantization_level == "Q8_0"
    assert details.capabilities == ["completion"]
    assert details.modelinfo and details.modelinfo["llama.context_length"] == 512


def test_load_and_unload(client: ollama.Client) -> None:
    assert client.generate(OTHER, "", keep_alive="10m").done_reason == "load"
    loaded = {model.model: model for model in client.ps().models}
    assert loaded[OTHER].context_length == 512
    assert client.generate(OTHER, "", keep_alive=0).done_reason == "unload"
    assert client.chat(OTHER, [], keep_alive=0).done_reason == "unload"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ({"model": "no-such-model"}, 404, "model 'no-such-model' not found"),
        ({"model": MODEL, "think": True}, 400, "does not support thinking"),
        ({"model": MODEL, "suffix": "end"}, 400, "does not support insert"),
        ({"model": MODEL, "template": "{{ 9**9**9 }}"}, 400, "template"),
        ({"model": MODEL, "options": {"top_k": "many"}}, 400, 'option "top_k" must be of type integer'),
        ({"model": MODEL, "options": {"temperature": -1}}, 400, "temperature is -1"),
        ({"model": MODEL, "keep_alive": "soon"}, 400, "duration"),
    ],
)
def test_errors_have_status_and_reason(
    client: ollama.Client, arguments: dict[str, Any], status: int, words: str
) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.generate(**{"prompt": "hello", **arguments})
    assert caught.value.status_code == status and words in caught.value.error


def test_a_long_chat_says_what_it_dropped(server: Any) -> None:
    import httpx

    turns = [{"role": role, "content": "word " * 20} for _ in range(20) for role in ("user", "assistant")]
    body = {"model": MODEL, "messages": [*turns, {"role": "user", "content": "And?"}], "stream": False}
    answer = httpx.post(f"{server.url}/api/chat", json=body | {"options": {"num_predict": 1}}, timeout=PATIENCE_S)
    assert answer.status_code == 200
    assert answer.json()["dropped_messages"] > 0 and answer.json()["dropped_tokens"] > 0
    refused = httpx.post(f"{server.url}/api/chat", json=body | {"truncate": False}, timeout=PATIENCE_S)
    assert refused.status_code == 400 and "context" in refused.json()["error"]


def test_progress_comes_before_the_first_token(server: Any) -> None:
    import httpx

    body = {"model": MODEL, "prompt": "a story of cats " * 20, "progress": True, "options": {"num_predict": 1}}
    lines = [
        json.loads(line)
        for line in httpx.post(f"{server.url}/api/generate", json=body, timeout=PATIENCE_S).text.splitlines()
    ]
    told = [line["progress"] for line in lines if "progress" in line]
    assert told and all(0 <= step["completed"] <= step["total"] for step in told)
    assert "progress" in lines[0] and lines[-1]["done"]
