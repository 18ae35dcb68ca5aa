"""Fields without effect are told in the log, also where another route has them."""

import logging
from typing import Any

import pytest

from localllm.server import bodies
from localllm.server.bodies import Body, log_ignored
from localllm.server.llama_cpp import routes as llama_cpp
from localllm.server.ollama import schema as ollama
from localllm.server.openai import schema as openai


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
