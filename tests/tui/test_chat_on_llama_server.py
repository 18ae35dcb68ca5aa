"""The chat's backend on llama.cpp's own llama-server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.answer.event import AnswerEvent, PartKind
from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason
from localllm.remote.connection import RemoteError
from localllm.remote.openai import OpenAIServer
from localllm.settings import Settings
from tests.fakes.llama_server import SLOT_TOKENS, llama_stories, needs_program
from tests.oracle import llama_oracle
from tests.picture_files import png
from tests.projector_files import MLP_ROWS, write_projector
from tui.server_backend import OpenAIBackend

pytestmark = [pytest.mark.slow, pytest.mark.oracle, llama_oracle.needs_llama, needs_program]
KEY = "sesame"
HI = [{"role": "user", "content": "Tell me a story"}]


@pytest.fixture(scope="module")
def backend(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIBackend]:
    projector = write_projector(tmp_path_factory.mktemp("projector") / "p.gguf")
    with llama_stories(data_dir, projector, KEY) as address:
        yield OpenAIBackend(OpenAIServer.at(address, Settings(remote_key=KEY)))


def answer(backend: OpenAIBackend, messages: list[Any], **asked: Any) -> tuple[dict[PartKind, str], AnswerEvent]:
    """The text by kind, and the last event."""
    texts = dict.fromkeys(PartKind, "")
    for event in backend.submit(AnswerRequest(messages=messages, sampling={"temperature": 0.0}, **asked)):
        for part in event.parts:
            texts[part.kind] += part.text
    return texts, event


def test_a_chat_on_it(backend: OpenAIBackend) -> None:
    with pytest.raises(RemoteError, match=r"has no model 'else'\. It has: stories"):
        backend.load("else", lambda what, share: None)
    assert backend.load("stories", lambda what, share: None).context == SLOT_TOKENS
    thought, last = answer(backend, HI, max_tokens=16)
    assert backend.count_tokens(HI[0]["content"])
    assert thought[PartKind.REASONING] and not thought[PartKind.CONTENT]
    assert (last.finish_reason, last.counts.generated) == (FinishReason.LENGTH, 16)
    first, before = answer(backend, HI, max_tokens=16, think=False)
    cut = [*HI, {"role": "assistant", "content": first[PartKind.CONTENT]}]
    more, after = answer(backend, cut, max_tokens=16, think=False)
    assert first[PartKind.CONTENT] and more[PartKind.CONTENT] and not more[PartKind.REASONING]
    assert after.counts.prompt > before.counts.prompt


def test_pictures_and_a_full_context(backend: OpenAIBackend) -> None:
    backend.load("stories", lambda what, share: None)
    plain = answer(backend, HI, max_tokens=2)[1].counts.prompt
    shown = [
        {"role": "user", "content": [{"type": "image", "data": png()}, {"type": "text", "text": "Tell me a story"}]}
    ]
    assert answer(backend, shown, max_tokens=2)[1].counts.prompt - plain >= MLP_ROWS
    long = [{"role": "user", "content": "long " * 4 * SLOT_TOKENS}]
    _, last = answer(backend, long)
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None and "exceeds the available context size" in last.error
