"""`localllm serve --remote` in front of llama.cpp's own llama-server."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import ollama
import openai
import pytest

from tests.fakes.llama_server import CALL, SLOT_TOKENS, llama_stories, needs_program
from tests.oracle import llama_oracle
from tests.picture_files import png
from tests.projector_files import MLP_ROWS, write_projector
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.oracle, llama_oracle.needs_llama, needs_program]
KEY = "sesame"
HI: Any = [{"role": "user", "content": "Tell me a story"}]
GREEDY = {"temperature": 0, "num_predict": 24}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["big", "small"]}, "old": {"type": "boolean"}},
    "required": ["size", "old"],
    "additionalProperties": False,
}
ARGUMENTS = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": ARGUMENTS}}
    for name in ("clock", "weather")
]


@pytest.fixture(scope="module")
def front(data_dir: Path, start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    projector = write_projector(tmp_path_factory.mktemp("projector") / "p.gguf")
    with (
        llama_stories(data_dir, projector, KEY) as address,
        start_server("--remote", address, models=(), LOCALLLM_REMOTE_KEY=KEY) as server,
    ):
        yield server.url


@pytest.fixture
def client(front: str) -> Iterator[ollama.Client]:
    with ollama.Client(host=front) as client:
        yield client


def test_thinking_is_switched(client: ollama.Client) -> None:
    loud = client.chat("stories", HI, options=GREEDY, think=True).message
    quiet = client.chat("stories", HI, options=GREEDY, think=False).message
    assert loud.thinking and not loud.content
    assert quiet.content and not quiet.thinking


def test_a_schema_holds_in_chats_and_without(client: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 60}
    chat = client.chat("stories", HI, options=options, think=False, format=SCHEMA)
    raw = client.generate("stories", "Once", raw=True, options=options, format=SCHEMA)
    for text in (chat.message.content, raw.response):
        found = json.loads(text or "")
        assert found["size"] in ("big", "small") and isinstance(found["old"], bool)
    free = client.generate("stories", "Once", raw=True, options=options, format="json")
    assert free.response.startswith("{")


def test_the_named_tool_is_called(front: str) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    with openai.OpenAI(base_url=f"{front}/v1", api_key="-") as api:
        for choice in (named, "required"):
            begun: Any = [*HI, CALL]
            answer = api.chat.completions.create(
                model="stories",
                messages=begun,
                tools=TOOLS,
                tool_choice=choice,
                max_tokens=99,
                temperature=0,
                reasoning_effort="none",
            )
            call = (answer.choices[0].message.tool_calls or [])[0]
            assert call.type == "function" and json.loads(call.function.arguments)["rain"] in (True, False)
            assert choice == "required" or call.function.name == "weather"


def test_probabilities_with_and_without_rivals(front: str) -> None:
    with openai.OpenAI(base_url=f"{front}/v1", api_key="-") as api:
        for rivals in (None, 2):
            answer = api.chat.completions.create(
                model="stories", messages=HI, logprobs=True, top_logprobs=rivals, max_tokens=3, temperature=0
            )
            told = answer.choices[0].logprobs
            assert told is not None and told.content is not None
            assert [len(entry.top_logprobs) for entry in told.content] == [rivals or 0] * 3
            assert all(entry.logprob <= 0 for entry in told.content)


def test_images_reach_it(client: ollama.Client) -> None:
    picture = base64.b64encode(png()).decode()
    shown = client.chat("stories", [{**HI[0], "images": [picture]}], options=GREEDY)
    plain = client.chat("stories", HI, options=GREEDY)
    assert (shown.prompt_eval_count or 0) - (plain.prompt_eval_count or 0) >= MLP_ROWS


def test_an_answer_is_continued(client: ollama.Client) -> None:
    begun = [*HI, {"role": "assistant", "content": "Once upon a"}]
    more = client.chat("stories", begun, options=GREEDY, think=False)
    fresh = client.chat("stories", HI, options=GREEDY, think=False)
    assert more.message.content and more.message.content != fresh.message.content


def test_what_it_tells_of_its_model(client: ollama.Client, front: str) -> None:
    assert client.show("stories").modelinfo["remote.context_length"] == SLOT_TOKENS
    health = httpx2.get(f"{front}/health", timeout=PATIENCE_S).json()
    assert health["ready"] is True


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("/api/generate", {"prompt": "long " * 4 * SLOT_TOKENS}, 400, "exceeds the available context size"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 501, "does not support suffix"),
        ("/api/embed", {"input": "a"}, 501, "does not support embeddings"),
    ],
)
def test_its_refusals_come_through(front: str, route: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = httpx2.post(f"{front}{route}", json={"model": "stories", "stream": False, **body}, timeout=PATIENCE_S)
    assert answer.status_code == status and words in answer.json()["error"]
