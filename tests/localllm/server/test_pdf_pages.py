"""Pages of a PDF that have no text: pictures for models that see, a note and a warning for others."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.localllm.server.conftest import MODEL
from tests.pdf_files import DRAWING, pdf_of
from tests.projector_files import write_projector
from tests.waiting import PATIENCE_S

pytest.importorskip("pypdf")
pytest.importorskip("pypdfium2")

MIXED = pdf_of([["The pier opens at six."], DRAWING, ["It closes at nine."], DRAWING])
SCANNED = pdf_of([DRAWING, DRAWING])


@pytest.fixture(scope="module")
def http(start_server: Any, model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with a model that sees, called seer, and one that does not."""
    folder = tmp_path_factory.mktemp("seeing")
    shutil.copyfile(model_files / "stories260K-F32.gguf", folder / "seer.gguf")
    write_projector(folder / "mmproj-seer.gguf", "gemma4uv")
    flags = ("--model", str(folder / "seer.gguf"))
    with (
        start_server(*flags, models=(MODEL,), LOCALLLM_IMAGE_MAX_TOKENS="16") as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def bodies(data: bytes) -> dict[str, dict[str, Any]]:
    """A question about a PDF on each protocol that has files, and a PDF in results of tools."""
    encoded = base64.b64encode(data).decode()
    url = f"data:application/pdf;base64,{encoded}"
    file = {"type": "file", "file": {"filename": "tide.pdf", "file_data": url}}
    source = {"type": "base64", "media_type": "application/pdf", "data": encoded}
    document = {"type": "document", "title": "tide.pdf", "source": source}
    call = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    asked = {"role": "user", "content": "?"}
    return {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [file]}]},
        "/v1/chat/completions#tool": {
            "messages": [
                asked,
                {"role": "assistant", "tool_calls": call},
                {"role": "tool", "tool_call_id": "1", "content": [file]},
            ]
        },
        "/v1/responses": {
            "input": [
                {"role": "user", "content": [{"type": "input_file", "filename": "tide.pdf", "file_data": url}]},
            ]
        },
        "/v1/messages": {"messages": [{"role": "user", "content": [document]}]},
        "/v1/messages#tool": {
            "messages": [
                asked,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [document]}]},
            ]
        },
    }


def posted(http: httpx.Client, path: str, model: str, body: dict[str, Any]) -> dict[str, Any]:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    reply = http.post(path.partition("#")[0], json={"model": model, limit: 1, "temperature": 0, **body})
    assert reply.status_code == 200, (path, reply.text)
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.mark.parametrize("data", [MIXED, SCANNED], ids=["mixed", "scanned"])
def test_a_model_that_sees_gets_pages_without_text_as_pictures(http: httpx.Client, data: bytes) -> None:
    for path, body in bodies(data).items():
        answer = posted(http, path, "seer", body)
        seen = answer.get("pictures") or answer["choices"][0]["pictures"]
        assert [(one["width"] / one["height"]) for one in seen] == [pytest.approx(595 / 842, abs=0.01)] * 2, path
        assert "warnings" not in answer, path
    if data is MIXED:
        shown = http.post("/apply-template", json={"model": "seer", **bodies(data)["/v1/chat/completions"]}).json()
        text = "tide.pdf\nThe pier opens at six.\n\n[page 2: a picture]\n\nIt closes at nine.\n\n[page 4: a picture]\n"
        assert text in shown["prompt"]


@pytest.mark.parametrize("data", [MIXED, SCANNED], ids=["mixed", "scanned"])
def test_a_text_model_refuses_pages_as_pictures(http: httpx.Client, data: bytes) -> None:
    for path, body in bodies(data).items():
        answer = posted(http, path, MODEL, body)
        (warning,) = answer.get("warnings") or answer["choices"][0]["warnings"]
        assert warning.endswith("reads text only, without 2 pictures in files and results of tools."), path
    shown = http.post("/apply-template", json={"model": MODEL, **bodies(data)["/v1/chat/completions"]}).json()["prompt"]
    number = 2 if data is MIXED else 1
    assert f"[page {number} of the file, a picture: left out" in shown


def test_pages_that_exceed_the_context_are_refused_with_their_number(http: httpx.Client) -> None:
    for path, body in bodies(pdf_of([DRAWING] * 20)).items():
        reply = http.post(path.partition("#")[0], json={"model": "seer", "max_tokens": 1, **body})
        assert reply.status_code == 400 and "20 images of the last message take 560 tokens" in reply.text, path


def test_the_page_of_the_server_attaches_pages(http: httpx.Client) -> None:
    for model, data, names in (
        ("seer", MIXED, ["tide.pdf", "tide.pdf, page 2", "tide.pdf, page 4"]),
        ("seer", SCANNED, ["tide.pdf, page 1", "tide.pdf, page 2"]),
        (MODEL, MIXED, ["tide.pdf", "tide.pdf, page 2", "tide.pdf, page 4"]),
    ):
        files = [{"name": "tide.pdf", "data": base64.b64encode(data).decode()}]
        begun = http.post("/api/chats", json={"model": model, "content": "?", "files": files}).json()
        message = http.get(f"/api/chats/{begun['chat']}").json()["messages"][0]
        assert [file["name"] for file in message["files"]] == names
    refused = http.post("/api/chats", json={"model": MODEL, "content": "?", "files": [
        {"name": "tide.pdf", "data": base64.b64encode(SCANNED).decode()}
    ]})  # fmt: skip
    assert refused.status_code == 400 and "reads text only" in refused.text
