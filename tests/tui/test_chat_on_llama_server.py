"""The chat's backend on llama.cpp's own llama-server."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.engine.answer_parts import PartKind
from localllm.engine.request import FinishReason, SamplingParams
from localllm.remote.errors import RemoteError
from localllm.remote.server import remote_server
from localllm.settings import Settings
from tests.fakes.llama_server import SLOT_TOKENS, llama_stories, needs_program
from tests.gpu_offload.projector_files import PATCHES, png, write_projector
from tests.oracle import llama_oracle
from tui.backend import AnswerUpdate, ChatRequest, Turn
from tui.openai_backend import OpenAIBackend

pytestmark = [pytest.mark.slow, pytest.mark.oracle, llama_oracle.needs_llama, needs_program]
KEY = "sesame"
HI = (Turn("user", "Tell me a story"),)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def backend(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIBackend]:
    projector = write_projector(tmp_path_factory.mktemp("projector") / "p.gguf")
    with llama_stories(data_dir, projector, KEY) as address:
        yield OpenAIBackend(remote_server(address, Settings(remote_key=KEY)))


def answer(backend: OpenAIBackend, request: ChatRequest) -> tuple[dict[PartKind, str], AnswerUpdate]:
    """The text by its kind, and the last update."""
    running, texts = backend.submit(request), dict.fromkeys(PartKind, "")
    end = time.monotonic() + 60
    while True:
        assert time.monotonic() < end
        update = running.poll()
        if update is None:
            time.sleep(0.005)
            continue
        for part in update.parts:
            texts[part.kind] += part.text
        if update.finish_reason is not None:
            return texts, update


def test_a_chat_on_it(backend: OpenAIBackend) -> None:
    with pytest.raises(RemoteError, match=r"has no model 'else'\. It has: stories"):
        backend.load("else", lambda what, share: None)
    assert backend.load("stories", lambda what, share: None).context == SLOT_TOKENS
    thought, last = answer(backend, ChatRequest(HI, GREEDY, max_tokens=16))
    assert thought[PartKind.REASONING] and not thought[PartKind.CONTENT]
    assert (last.finish_reason, last.counts.generated) == (FinishReason.LENGTH, 16)
    first, before = answer(backend, ChatRequest(HI, GREEDY, max_tokens=16, thinking=False))
    cut = (*HI, Turn("assistant", first[PartKind.CONTENT]))
    more, after = answer(backend, ChatRequest(cut, GREEDY, max_tokens=16, thinking=False, continues=True))
    assert first[PartKind.CONTENT] and more[PartKind.CONTENT] and not more[PartKind.REASONING]
    assert after.counts.prompt > before.counts.prompt


def test_pictures_and_a_full_context(backend: OpenAIBackend) -> None:
    backend.load("stories", lambda what, share: None)
    plain = answer(backend, ChatRequest(HI, GREEDY, max_tokens=2))[1].counts.prompt
    shown = (Turn("user", "Tell me a story", pictures=(png(),)),)
    assert answer(backend, ChatRequest(shown, GREEDY, max_tokens=2))[1].counts.prompt - plain >= PATCHES
    long = (Turn("user", "long " * 4 * SLOT_TOKENS),)
    _, last = answer(backend, ChatRequest(long, GREEDY))
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None and "exceeds the available context size" in last.error
