"""Fields without effect are told in the log, also where another route has them."""

import logging
from typing import Any

import pytest

from localllm.server import bodies
from localllm.server.anthropic.requests import MessagesBody
from localllm.server.bodies import IGNORED, Body, log_ignored
from localllm.server.llama_cpp import routes as llama_cpp
from localllm.server.ollama import schema as ollama
from localllm.server.openai import schema as openai

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (openai.EmbeddingsBody, {"input": "Hi"}),
        (llama_cpp.EmbeddingBody, {"content": "Hi"}),
        (llama_cpp.RerankBody, {"query": "Hi", "documents": ["Ho"]}),
        (ollama.EmbedBody, {"input": "Hi"}),
        (ollama.OllamaEmbeddingsBody, {"prompt": "Hi"}),
    ],
)
def test_sampling_has_no_effect_on_vectors_and_ranks(
    body: type[Body], fields: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_ignored.cache_clear()
    monkeypatch.setattr(bodies, "_NOTES", type(bodies._NOTES)())  # as if nothing had been logged in this minute
    ignored: dict[str, Any] = {"top_k": 3, "min_p": 0.1, "num_ctx": 512, "lora": [], "priority": 1, "options": {}}
    with caplog.at_level(logging.INFO):
        body.model_validate({"model": "m", "keep_alive": 1, **fields, **ignored})
    assert sorted(caplog.messages) == sorted(f"ignored: field {name!r} of {body.__name__}" for name in ignored)


@pytest.mark.parametrize(
    ("body", "fields", "warning"),
    [
        (openai.ResponsesBody, {"text": {"format": {"type": "text"}, "verbosity": "low"}}, "'verbosity' of text"),
        (openai.ResponsesBody, {"reasoning": {"effort": "low", "context": "auto"}}, "'context' of reasoning"),
        (openai.ChatBody, {"messages": HI, "reasoning": {"exclude": True}}, "'exclude' of reasoning"),
        (openai.ChatBody, {"messages": HI, "stream_options": {"include_obfuscation": False, "every": 2}}, "'every' of"),
        (
            MessagesBody,
            {"messages": HI, "max_tokens": 1, "thinking": {"type": "enabled", "budget_tokens": 9}},
            "budget",
        ),
        (MessagesBody, {"messages": HI, "max_tokens": 1, "output_config": {"task": None, "length": 5}}, "'length' of"),
    ],
)
def test_the_answer_names_ignored_fields_of_parameters(body: type[Body], fields: dict[str, Any], warning: str) -> None:
    ignored: list[str] = []
    token = IGNORED.set(ignored)
    try:
        body.model_validate({"model": "m", **fields})
    finally:
        IGNORED.reset(token)
    assert len(ignored) == 1 and warning in ignored[0]
