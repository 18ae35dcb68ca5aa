"""llama.cpp's own llama-server, a server that is not ours, as the one that answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.answer_parts import PartKind
from localllm.engine.request import FinishReason
from localllm.remote.connection import Call, Endpoint
from localllm.remote.server import RemoteServer, RemoteUpdate, remote_server
from localllm.settings import Settings
from tests.fakes.llama_server import CALL, SLOT_TOKENS, llama_stories, needs_program
from tests.gpu_offload.projector_files import PATCHES, png, write_projector
from tests.oracle import llama_oracle
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.oracle, llama_oracle.needs_llama, needs_program]
PROMPT = "Once upon a time"
KEY = "sesame"
HI = [{"role": "user", "content": "Tell me a story"}]
GREEDY = {"temperature": 0, "max_tokens": 24}
ARGUMENTS = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": ARGUMENTS}}


@pytest.fixture(scope="module")
def address(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama_stories(data_dir, write_projector(tmp_path_factory.mktemp("projector") / "p.gguf"), KEY) as found:
        yield found


@pytest.fixture
def server(address: str) -> RemoteServer:
    return remote_server(address, Settings(remote_key=KEY))


def text_of(updates: list[RemoteUpdate], kind: PartKind = PartKind.CONTENT) -> str:
    return "".join(part.text for update in updates for part in update.parts if part.kind is kind)


def working(address: str) -> int:
    """How many of its slots compute."""
    slots = Call(Endpoint.parse(address, KEY, path=""), "GET", "/slots")
    return sum(slot["is_processing"] for slot in json.loads(b"".join(slots.lines())))


def test_a_completion_is_what_the_model_says_here(server: RemoteServer, data_dir: Path) -> None:
    model = data_dir / "models" / "gguf" / "stories260K-F32.gguf"
    updates = list(server.complete("stories", PROMPT, GREEDY))
    expected = llama_oracle.detokenize(model, llama_oracle.greedy(model, llama_oracle.tokenize(model, PROMPT), 24))
    assert text_of(updates).strip() == expected.decode().strip()
    last = updates[-1]
    assert (last.finish_reason, last.counts.generated) == (FinishReason.LENGTH, 24)
    assert last.counts.prompt == len(llama_oracle.tokenize(model, PROMPT))
    again = list(server.complete("stories", PROMPT, GREEDY))[-1]
    assert again.counts.cached == again.counts.prompt - 1, "its last token is computed anew"


def test_its_model_has_the_context_of_a_slot(server: RemoteServer) -> None:
    assert [(model.name, model.context) for model in server.models()] == [("stories", SLOT_TOKENS)]


def test_thoughts_are_told_apart(server: RemoteServer) -> None:
    thinking = list(server.chat("stories", HI, GREEDY))
    assert text_of(thinking, PartKind.REASONING) and not text_of(thinking)
    assert len([update for update in thinking if update.parts]) > 2, "it streams"
    plain = list(server.chat("stories", HI, GREEDY | QUIET))
    assert text_of(plain) and not text_of(plain, PartKind.REASONING)


def test_a_stop_string_ends_it(server: RemoteServer) -> None:
    whole = text_of(list(server.complete("stories", PROMPT, GREEDY)))
    word = whole.split()[3]
    updates = list(server.complete("stories", PROMPT, GREEDY | {"stop": [word]}))
    assert text_of(updates) == whole[: whole.index(word)]
    assert updates[-1].finish_reason is FinishReason.STOP


def test_probabilities_of_chats_and_completions(server: RemoteServer, data_dir: Path) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 3}
    chat = list(server.chat("stories", HI, asked | {"logprobs": True, "top_logprobs": 2}))
    completion = list(server.complete("stories", PROMPT, asked | {"logprobs": 2}))
    for updates in (chat, completion):
        told = [entry for update in updates for entry in update.logprobs]
        assert len(told) == 3
        assert all(len(entry.top) == 2 and entry.logprob == entry.top[0][1] <= 0 for entry in told)
    assert text_of(completion).encode() == b"".join(
        entry.spelling for update in completion for entry in update.logprobs
    )


def test_a_tool_is_called(server: RemoteServer) -> None:
    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 99}
    updates = list(server.chat("stories", [*HI, CALL], options | QUIET))
    (call,) = [call for update in updates for part in update.parts for call in part.tool_calls]
    assert call.name == "weather" and isinstance(call.arguments["rain"], bool)
    assert updates[-1].finish_reason is FinishReason.STOP


def test_images_are_seen(server: RemoteServer) -> None:
    text = {"type": "text", "text": "What is it?"}
    shown = [{"role": "user", "content": [{"type": "image", "data": png()}, text]}]
    counts = [
        list(server.chat("stories", messages, GREEDY))[-1].counts.prompt
        for messages in (shown, [{**shown[0], "content": [text]}])
    ]
    assert counts[0] - counts[1] >= PATCHES


def test_leaving_frees_its_slot(server: RemoteServer, address: str) -> None:
    answer = server.chat("stories", HI, {"max_tokens": 100_000, "ignore_eos": True})
    updates = []
    for update in answer:
        if not updates:
            assert working(address) == 1
        updates.append(update)
        answer.cancel()
    assert updates[-1].finish_reason is FinishReason.CANCELLED
    eventually(lambda: not working(address))


def test_refusals_come_in_its_words(server: RemoteServer, address: str) -> None:
    (refused,) = remote_server(address, Settings(remote_key="wrong")).chat("stories", HI, {})
    assert refused.error is not None
    assert "Invalid API Key. Set the server's key: LOCALLLM_REMOTE_KEY" in refused.error
    (too_long,) = server.complete("stories", "long " * 4 * SLOT_TOKENS, {})
    assert too_long.error is not None
    assert f"exceeds the available context size ({SLOT_TOKENS} tokens)" in too_long.error
    (bad,) = server.chat("stories", HI, {"tools": [WEATHER], "tool_choice": "sometimes"})
    assert bad.error is not None and "Invalid tool_choice: sometimes" in bad.error
