"""Every request that our OpenAPI allows is answered without an internal error."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings

from tests.gpu_offload import lora_files
from tests.gpu_offload.reranker_files import bert_reranker
from tests.oracle import llama_oracle
from tests.picture_files import png
from tests.projector_files import write_projector
from tests.waiting import PATIENCE_S

MODEL = "stories260K-Q8_0"
PICTURE = base64.b64encode(png(1)).decode()

# pull and push contact other machines, the events of chats do not end, and the others answer 501 to every change.
CHANGES = ["/slots/{slot}"]
# Each is another name of a route that is tried.
NAMES = [
    "/chat/completions", "/chat/completions/input_tokens", "/completions", "/embeddings", "/models", "/rerank",
    "/reranking", "/responses", "/responses/input_tokens", "/v1/reranking",
]  # fmt: skip
# Without the thousands of requests that try each field's type and limits: they are refused before a backend is asked.
RANDOM = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
LEFT_OUT = ["/api/pull", "/api/push", "/api/chats/events", *CHANGES, *NAMES]


@pytest.fixture(scope="module")
def api(start_server: Any) -> Any:
    with start_server(LOCALLLM_CTX="64") as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """Connections that requests share; opening one takes as long as a request."""
    with requests.Session() as opened:
        opened.trust_env = False
        yield opened


schema = schemathesis.pytest.from_fixture("api").exclude(path=LEFT_OUT)


@pytest.fixture(scope="module")
def llama_api(start_server: Any, model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with a vision model that has an adapter, and with a reranker."""
    folder = tmp_path_factory.mktemp("llama")
    shutil.copyfile(model_files / "stories260K-F32.gguf", folder / "seer.gguf")
    write_projector(folder / "mmproj-seer.gguf")
    bert_reranker(folder / "ranker.gguf")
    adapter = lora_files.write(folder / "adapter.gguf", lora_files.factors(folder / "seer.gguf", 1), "llama")
    flags = ["--model", str(folder / "seer.gguf"), "--model", str(folder / "ranker.gguf"), "--lora", str(adapter)]
    with start_server(*flags, models=(), LOCALLLM_BACKEND="llama", LOCALLLM_CTX="400") as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=RANDOM)


GENERATING = [
    "/api/generate", "/api/chat", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/rerank", "/rerank", "/api/embed",
]  # fmt: skip
llama_schema = schemathesis.pytest.from_fixture("llama_api").include(path=GENERATING)


def with_what_this_server_has(body: dict[str, Any], path: str) -> dict[str, Any]:
    """The body with its models' names, with a picture if it has images, and an adapter."""
    body["model"] = "ranker" if "rerank" in path else "seer"
    if isinstance(body.get("images"), list) and body["images"]:
        body["images"][0] = PICTURE
    for message in body["messages"][:3] if isinstance(body.get("messages"), list) else []:
        if isinstance(message, dict) and isinstance(message.get("images"), list) and message["images"]:
            message["images"][0] = PICTURE
        elif isinstance(message, dict) and isinstance(message.get("content"), list):
            url = f"data:image/png;base64,{PICTURE}"
            message["content"].append({"type": "image_url", "image_url": {"url": url}})
    if isinstance(body.get("lora"), list) and body["lora"]:
        body["lora"][0] = {"id": 0, "scale": 0.5}
    limit = "num_predict" if path.startswith("/api/") else "max_output_tokens" if "responses" in path else "max_tokens"
    if path.startswith("/api/"):
        body["options"] = {limit: 2}
    else:
        body[limit] = 16
    return body


@pytest.mark.slow
@pytest.mark.oracle
@llama_oracle.needs_llama
@llama_schema.parametrize()
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_image_adapter_or_document_meets_a_defect(case: schemathesis.Case, session: requests.Session) -> None:
    if isinstance(case.body, dict):
        with_what_this_server_has(case.body, case.path)
    answer = case.call(session=session, timeout=PATIENCE_S)
    assert answer.status_code < 500 or answer.status_code == 503, (answer.status_code, answer.text[:500], case.body)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_request_meets_a_defect(case: schemathesis.Case, session: requests.Session) -> None:
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = MODEL
    answer = case.call(session=session, timeout=PATIENCE_S)
    if (case.method, case.path) == ("POST", "/props"):
        assert answer.status_code == 501
        return
    # 503 means too many requests or too little memory, which is not a bug.
    assert answer.status_code < 500 or answer.status_code == 503, (answer.status_code, answer.text[:500], case.body)
