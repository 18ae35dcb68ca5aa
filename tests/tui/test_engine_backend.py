"""Requests to the chat's own engine: continuing cut answers, even within reasoning, and applying manifests."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_offload.options import LlamaOptions
from localllm.answer.event import PartKind
from localllm.answer.local import LocalModel
from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason, GenerationRequest, TokenEvent
from localllm.library.behaviour import Behaviour
from localllm.placement.placement import Placement
from localllm.settings import Settings
from tui.engine_backend import _place

THINK = (("<think>", "</think>"),)


class Engine:
    """Takes a request and answers with a text."""

    context = 512

    def __init__(self, text: str) -> None:
        self.requests: list[GenerationRequest] = []
        self.events = deque([TokenEvent(text=text), TokenEvent(finish_reason=FinishReason.STOP)])

    def submit(self, request: GenerationRequest) -> SimpleNamespace:
        self.requests.append(request)
        return SimpleNamespace(poll=lambda: [self.events.popleft()] if self.events else [])


class Model:
    """A loaded model whose tokens are characters and whose template writes the roles in brackets."""

    sees_images = False
    see = staticmethod(lambda _data, **_options: ())
    placement = SimpleNamespace(settings=Settings())

    def __init__(self, text: str, starts_in_reasoning: bool = False) -> None:
        self.engine = Engine(text)
        opening = "<think>" if starts_in_reasoning else ""

        def render(messages: list[dict[str, str]], **_options: object) -> str:
            return "".join(f"[{message['role']}]{message['content']}" for message in messages) + opening

        self.template = SimpleNamespace(
            is_default=False,
            reasoning_markers=THINK,
            shown="",
            source="",
            stop_strings=("[",),
            render=render,
            supports_thinking=False,
            starts_in_reasoning=lambda _rendered: starts_in_reasoning,
        )
        self.tokenizer = SimpleNamespace(
            encode=lambda text, **_options: [ord(letter) for letter in text],
            markup=lambda _text: [],
            add_bos=False,
            bos_id=None,
            token_bytes=lambda token: bytes([token]),
        )


def ask(model: Any, messages: list[Any], behaviour: Behaviour | None = None) -> tuple[str, list[tuple[str, str]]]:
    """The prompt as text, and the answer's parts."""
    request = AnswerRequest(messages=messages, continues_text=True)
    answer = LocalModel("m", model, behaviour or Behaviour()).prepare(request).submit()
    parts = []
    while events := answer.poll():
        parts += [(str(part.kind), part.text) for event in events for part in event.parts]
    return "".join(map(chr, model.engine.requests[0].prompt)), parts


def cut(content: str, reasoning: str) -> list[Any]:
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    return [{"role": "user", "content": "2+2?"}, answer]


@pytest.mark.parametrize(
    ("starts_in_reasoning", "content", "reasoning", "prompt", "text", "parts"),
    [
        (False, "", "Two and", "<think>Two and", " two</think>Four", [("reasoning", " two"), ("content", "Four")]),
        (True, "", "Two and", "<think>Two and", " two</think>Four", [("reasoning", " two"), ("content", "Four")]),
        (True, "", "", "<think>", "Two</think>4", [("reasoning", "Two"), ("content", "4")]),
        (False, "Fo", "Two", "<think>Two</think>Fo", "ur", [("content", "ur")]),
        (True, "Fo", "Two", "<think>Two</think>Fo", "ur", [("content", "ur")]),
        (False, "Fo", "", "Fo", "ur", [("content", "ur")]),
    ],
)
def test_a_cut_answer_is_continued(
    starts_in_reasoning: bool, content: str, reasoning: str, prompt: str, text: str, parts: list[tuple[str, str]]
) -> None:
    asked, said = ask(Model(text, starts_in_reasoning), cut(content, reasoning))
    assert asked == f"[user]2+2?{prompt}"
    assert said == parts
    assert {kind for kind, _ in parts} <= set(PartKind)


def test_what_a_manifest_says_is_followed() -> None:
    behaviour = Behaviour(system="Be a pirate.", stop=("END",), messages=({"role": "user", "content": "Ahoy"},))
    model = Model("Arr")
    asked, _ = ask(model, [{"role": "user", "content": "Hi"}], behaviour)
    assert asked == "[system]Be a pirate.[user]Ahoy[user]Hi"
    assert (model.engine.requests[0].stop, model.engine.requests[0].ends) == (("END",), ("[",))


def test_the_users_system_prompt_replaces_the_manifests() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    asked, _ = ask(Model("Arr"), messages, Behaviour(system="Be a pirate."))
    assert asked == "[system]Be brief.[user]Hi"


def test_the_place_tells_layers_on_gpus() -> None:
    assert _place(Placement("native", "")) == "native, CPU"
    assert _place(Placement("llama", "")) == "llama.cpp, CPU"
    assert (
        _place(Placement("llama", "", options=LlamaOptions(gpu_layers=20), layers=29))
        == "llama.cpp, 20/29 layers on GPU"
    )
