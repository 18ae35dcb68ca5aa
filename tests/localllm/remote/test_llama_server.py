"""llama.cpp's own llama-server as the remote server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.answer.event import AnswerEvent, PartKind
from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason
from localllm.remote.connection import Endpoint, RemoteCall
from localllm.remote.openai import OpenAIServer
from localllm.remote.stream import RemoteStream
from localllm.settings import Settings
from tests.fakes.llama_server import CALL, SLOT_TOKENS, llama_stories, needs_program
from tests.oracle import llama_oracle
from tests.picture_files import png
from tests.projector_files import MLP_ROWS, write_projector
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.oracle, llama_oracle.needs_llama, needs_program]
PROMPT = "Once upon a time"
KEY = "sesame"
HI = [{"role": "user", "content": "Tell me a story"}]
COLD = {"temperature": 0}
GREEDY: dict[str, Any] = {"sampling": COLD, "max_tokens": 24}
ARGUMENTS = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": ARGUMENTS}}


@pytest.fixture(scope="module")
def address(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama_stories(data_dir, write_projector(tmp_path_factory.mktemp("projector") / "p.gguf"), KEY) as found:
        yield found


@pytest.fixture
def server(address: str) -> OpenAIServer:
    return OpenAIServer.at(address, Settings(remote_key=KEY))


def ask(server: OpenAIServer, **asked: Any) -> RemoteStream:
    return server.model("stories").prepare(AnswerRequest(**asked)).submit()


def text_of(updates: list[AnswerEvent], kind: PartKind = PartKind.CONTENT) -> str:
    return "".join(part.text for update in updates for part in update.parts if part.kind is kind)


def working(address: str) -> int:
    """How many of its slots are computing."""
    slots = RemoteCall(Endpoint.parse(address, KEY, path=""), "GET", "/slots")
    return sum(slot["is_processing"] for slot in json.loads(b"".join(slots.lines())))


def test_a_completion_is_what_the_model_says_here(server: OpenAIServer, data_dir: Path) -> None:
    model = data_dir / "models" / "gguf" / "stories260K-F32.gguf"
    updates = list(ask(server, prompt=PROMPT, **GREEDY))
    expected = llama_oracle.detokenize(model, llama_oracle.greedy(model, llama_oracle.tokenize(model, PROMPT), 24))
    assert text_of(updates).strip() == expected.decode().strip()
    last = updates[-1]
    assert (last.finish_reason, last.counts.generated) == (FinishReason.LENGTH, 24)
    assert last.counts.prompt == len(llama_oracle.tokenize(model, PROMPT))
    again = list(ask(server, prompt=PROMPT, **GREEDY))[-1]
    assert again.counts.cached == again.counts.prompt - 1, "its last token is computed anew"


def test_its_model_has_the_context_of_a_slot(server: OpenAIServer) -> None:
    assert [(model.name, model.context) for model in server.models()] == [("stories", SLOT_TOKENS)]


def test_thoughts_are_separated_from_content(server: OpenAIServer) -> None:
    thinking = list(ask(server, messages=HI, **GREEDY))
    assert text_of(thinking, PartKind.REASONING) and not text_of(thinking)
    assert len([update for update in thinking if update.parts]) > 2, "it streams"
    plain = list(ask(server, messages=HI, think=False, **GREEDY))
    assert text_of(plain) and not text_of(plain, PartKind.REASONING)


def test_a_stop_string_ends_it(server: OpenAIServer) -> None:
    whole = text_of(list(ask(server, prompt=PROMPT, **GREEDY)))
    word = whole.split()[3]
    updates = list(ask(server, prompt=PROMPT, stop=(word,), **GREEDY))
    assert text_of(updates) == whole[: whole.index(word)]
    assert updates[-1].finish_reason is FinishReason.STOP


def test_probabilities_of_chats_and_completions(server: OpenAIServer, data_dir: Path) -> None:
    asked: dict[str, Any] = {"sampling": COLD | {"logprobs": 2}, "max_tokens": 3}
    chat = list(ask(server, messages=HI, **asked))
    completion = list(ask(server, prompt=PROMPT, **asked))
    for updates in (chat, completion):
        told = [entry for update in updates for entry in update.logprobs]
        assert len(told) == 3
        assert all(len(entry.top) == 2 and entry.logprob == entry.top[0][1] <= 0 for entry in told)
    assert text_of(completion).encode() == b"".join(entry.token for update in completion for entry in update.logprobs)


def test_a_tool_is_called(server: OpenAIServer) -> None:
    wanted: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "", "one_call": True, "max_tokens": 99}
    updates = list(ask(server, messages=[*HI, CALL], think=False, **wanted))
    (call,) = [call for update in updates for part in update.parts for call in part.tool_calls]
    assert call.name == "weather" and isinstance(call.arguments["rain"], bool)
    assert updates[-1].finish_reason is FinishReason.STOP


def test_images_are_seen(server: OpenAIServer) -> None:
    text = {"type": "text", "text": "What is it?"}
    shown = [{"role": "user", "content": [{"type": "image", "data": png()}, text]}]
    counts = [
        list(ask(server, messages=messages, **GREEDY))[-1].counts.prompt
        for messages in (shown, [{**shown[0], "content": [text]}])
    ]
    assert counts[0] - counts[1] >= MLP_ROWS


def test_leaving_frees_its_slot(server: OpenAIServer, address: str) -> None:
    answer = ask(server, messages=HI, max_tokens=100_000, ignore_eos=True)
    updates = []
    for update in answer:
        if not updates:
            assert working(address) == 1
        updates.append(update)
        answer.cancel()
    assert updates[-1].finish_reason is FinishReason.CANCELLED
    eventually(lambda: not working(address))


def test_refusals_come_in_its_words(server: OpenAIServer, address: str) -> None:
    (refused,) = ask(OpenAIServer.at(address, Settings(remote_key="wrong")), messages=HI)
    assert refused.error is not None
    assert "Invalid API Key. Set the server's key: LOCALLLM_REMOTE_KEY" in refused.error
    (too_long,) = ask(server, prompt="long " * 4 * SLOT_TOKENS)
    assert too_long.error is not None
    assert f"exceeds the available context size ({SLOT_TOKENS} tokens)" in too_long.error
