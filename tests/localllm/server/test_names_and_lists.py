"""Which model answers a name, and what lists of models tell."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.fakes.scripted_model import write_scripted_model
from tests.localllm.server.conftest import MODEL, Server, StartServer
from tests.waiting import PATIENCE_S

HI = [{"role": "user", "content": "Hi"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": HI, "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/v1/responses/input_tokens", {"input": "Hi"}),
    ("/completion", {"prompt": "Hi", "n_predict": 2}),
    ("/tokenize", {"content": "Hi"}),
    ("/detokenize", {"tokens": [40]}),
    ("/apply-template", {"messages": HI}),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("one") / "one.gguf", {"plain": "The answer is short."})


@pytest.fixture(scope="module")
def one(start_server: StartServer, file: Path) -> Iterator[Server]:
    """A server with one model."""
    with start_server("--model", str(file), "--ctx", "4096", models=()) as server:
        yield server


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("name", [None, "", "gpt-4o-mini", "anthropic/claude-sonnet-4.5", "one", "one:latest"])
def test_the_only_model_answers_to_any_name(one: Server, path: str, body: dict[str, Any], name: str | None) -> None:
    answer = httpx.post(one.url + path, json={"model": name, **body}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    wanted = name if name and name.startswith("one") else "one"
    assert answer.json().get("model", wanted) == wanted


def test_a_stream_says_which_model_answers(one: Server) -> None:
    body = {"model": "o3", "messages": HI, "stream": True}
    answer = httpx.post(f"{one.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert '"model":"one"' in answer.text and "o3" not in answer.text


def test_ollamas_routes_need_the_name(one: Server) -> None:
    """Its clients pull a model that is not there."""
    for path, body in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "x"}), ("/api/show", {})):
        answer = httpx.post(one.url + path, json={"model": "no-such", **body}, timeout=PATIENCE_S)
        assert answer.status_code == 404


def test_a_setting_refuses_other_names(start_server: StartServer, file: Path) -> None:
    with start_server("--model", str(file), models=(), LOCALLLM_ANY_NAME="false") as server:
        body = {"model": "gpt-4o", "messages": HI}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 404 and "gpt-4o" in answer.json()["error"]["message"]
        unnamed = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "model": None}, timeout=PATIENCE_S)
        assert unnamed.status_code == 200


def test_several_models_are_distinguished(server: Server) -> None:
    """And the built-in model does not stand in for another."""
    answer = httpx.post(f"{server.url}/v1/messages", json={"model": "gpt-4o", "messages": HI, "max_tokens": 1})
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as gpt:
        with pytest.raises(openai.NotFoundError) as raised:
            gpt.models.retrieve("gpt-4o")
        assert raised.value.code == "model_not_found"


def test_a_model_whose_file_cannot_be_read_counts(start_server: StartServer, file: Path, tmp_path: Path) -> None:
    """The other one must not answer in its place."""
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes())
    with start_server("--model", str(file), "--model", str(other), models=()) as server:
        other.write_bytes(b"GGUF")
        assert "other" not in {row["id"] for row in httpx.get(f"{server.url}/v1/models").json()["data"]}
        for name in ("gpt-4o", "other:7b"):
            answer = httpx.post(f"{server.url}/v1/chat/completions", json={"model": name, "messages": HI})
            assert answer.status_code == 404, answer.text


def test_the_builtin_model_does_not_answer_for_others(start_server: StartServer) -> None:
    with start_server(models=()) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "qwen3", "messages": HI})
        assert answer.status_code == 404


def test_lists_tell_the_context(one: Server) -> None:
    httpx.post(f"{one.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=PATIENCE_S)
    rows = {row["id"]: row for row in httpx.get(f"{one.url}/v1/models").json()["data"]}
    row = rows["one"]
    assert row["max_model_len"] == row["meta"]["n_ctx"] == 4096 and row["meta"]["n_ctx_train"] == 262144
    assert httpx.get(f"{one.url}/v1/models/one").json() == row
    loaded = httpx.get(f"{one.url}/api/ps").json()["models"][0]
    assert loaded["context_length"] == 4096


def test_the_context_before_a_load_is_the_trained_one_or_the_settings(
    server: Server, start_server: StartServer
) -> None:
    trained = httpx.get(f"{server.url}/v1/models/{MODEL}").json()
    assert trained["max_model_len"] == trained["meta"]["n_ctx_train"] == 512
    with start_server("--ctx", "128") as limited:
        row = httpx.get(f"{limited.url}/v1/models/{MODEL}").json()
    assert row["meta"]["n_ctx"] == row["max_model_len"] == 128 and row["meta"]["n_ctx_train"] == 512


def test_openais_client_sees_openais_form(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as gpt:
        found = {one.id: one for one in gpt.models.list()}
    assert found[MODEL].object == "model"
    assert found[MODEL].max_model_len == 512  # type: ignore[attr-defined]


def test_anthropics_client_sees_anthropics_form(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        names = [one.id for one in claude.models.list(limit=1)]  # page by page
        assert MODEL in names and len(names) == len(set(names)) >= 2
        about = claude.models.retrieve(MODEL)
        assert (about.type, about.display_name, about.max_input_tokens) == ("model", MODEL, 512)
        backwards = claude.models.list(before_id=names[1], limit=1)
        assert [one.id for one in backwards.data] == names[:1]
        with pytest.raises(anthropic.NotFoundError) as missing:
            claude.models.retrieve("nothing")
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError):
            claude.models.list(after_id="nothing")
