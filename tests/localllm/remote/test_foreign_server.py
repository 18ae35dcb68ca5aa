"""A foreign server, llama-cpp-python's own, representing vLLM, SGLang and others."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason
from localllm.remote.openai import OpenAIServer
from localllm.remote.stream import NO_REASON, RemoteStream
from localllm.settings import Settings
from tests.fakes.llama_server import llama_server, needs_server
from tests.forking import Nursery
from tests.oracle import llama_oracle
from tests.systems import own_places

pytestmark = [pytest.mark.slow, pytest.mark.oracle, llama_oracle.needs_llama, needs_server]
PROMPT = "Once upon a time"
KEY = "sesame"
HI = [{"role": "user", "content": "Tell me a story"}]


@pytest.fixture(scope="module")
def model(data_dir: Path) -> Path:
    return data_dir / "models" / "gguf" / "stories260K-F32.gguf"


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    with llama_server(model, "stories", KEY) as found:
        yield found


@pytest.fixture
def server(address: str) -> OpenAIServer:
    return OpenAIServer.at(address, Settings(remote_key=KEY))


def run(children: Nursery, address: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """The output of `localllm run --remote --json`."""
    own = {"LOCALLLM_REMOTE_KEY": KEY, **own_places(folder)}
    done = children.run("run", "--remote", address, "--json", *arguments, **own)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_run_gives_what_the_model_says_here(address: str, model: Path, children: Nursery, tmp_path: Path) -> None:
    greedy = ("--temperature", "0", "--repeat-penalty", "1", "--max-tokens", "40")
    found = run(children, address, tmp_path, "stories", PROMPT, "--raw", *greedy)
    ids = llama_oracle.tokenize(model, PROMPT)
    expected = llama_oracle.detokenize(model, llama_oracle.greedy(model, ids, 40)).decode()
    assert found["text"].strip() == expected.strip()
    assert (found["backend"], found["finish_reason"]) == ("remote", "length")
    assert found["completion_tokens"] > 0


def ask(server: OpenAIServer, **asked: Any) -> RemoteStream:
    return server.model("stories").prepare(AnswerRequest(**asked)).submit()


def test_a_chat_streams_and_can_be_stopped(server: OpenAIServer) -> None:
    assert [model.name for model in server.models()] == ["stories"]
    updates = list(ask(server, messages=HI, max_tokens=12, sampling={"seed": 1}))
    assert updates[-1].finish_reason is FinishReason.LENGTH
    assert len([update for update in updates if update.parts]) > 2
    answer = ask(server, messages=HI, max_tokens=400)
    updates = []
    for update in answer:
        updates.append(update)
        answer.cancel()
    assert updates[-1].finish_reason is FinishReason.CANCELLED
    # The server has released its one model, and answers again.
    assert list(ask(server, messages=HI, max_tokens=2))[-1].finish_reason is FinishReason.LENGTH


def test_errors_come_in_its_words(address: str, server: OpenAIServer) -> None:
    (refused,) = ask(OpenAIServer.at(address, Settings(remote_key="wrong")), messages=HI)
    assert refused.error is not None and "LOCALLLM_REMOTE_KEY" in refused.error
    # It refuses a prompt that is too long, but streams an empty answer if it should stream.
    (too_long,) = ask(server, prompt="long " * 900)
    assert too_long.error == NO_REASON
