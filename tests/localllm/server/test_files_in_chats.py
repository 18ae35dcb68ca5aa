"""Files and other content that is not text: read if they have text, else a note stands in their place."""

import base64
import importlib.util
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from localllm.extraction import UnreadableError
from localllm.server.contents import openai_content
from localllm.server.files import READ, sent_file
from localllm.server.limits import MAX_FILES
from tests.fakes.scripted_model import write_scripted_model
from tests.localllm.server.conftest import StartServer
from tests.pdf_files import pdf_of
from tests.waiting import PATIENCE_S

PDF = pdf_of([["The harbour closes at nine."], ["The ferry leaves at ten."]])
needs_pypdf = pytest.mark.skipif(importlib.util.find_spec("pypdf") is None, reason="pypdf is not installed")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{b64(data)}"


NOTES = url("Grüße from the island".encode(), "text/plain")


@pytest.fixture(scope="module")
def http(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = write_scripted_model(tmp_path_factory.mktemp("files") / "scripted.gguf", {"plain": "I have read all of it."})
    with (
        start_server("--model", str(path), models=()) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def chat(*parts: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": list(parts)}]}


def responses(*parts: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [{"role": "user", "content": list(parts)}]}


def claude(*blocks: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"max_tokens": 50, "messages": [{"role": "user", "content": list(blocks)}]}


AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
UNREAD: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (chat({"type": "text", "text": "Hear:"}, AUDIO), "part of type 'input_audio' that is no WAV file"),
    (chat({"type": "file", "file": {"file_id": "file-1"}}), "a file that is not in the request"),
    (
        chat({"type": "file", "file": {"filename": "a.bin", "file_data": url(b"\0\1", "x/y")}}),
        "a file that is not text",
    ),
    (chat({"type": "video_url", "video_url": {"url": "https://x"}}), "part of type 'video_url'"),
    (responses({"type": "input_file", "file_url": "https://x/y.pdf"}), "a file that is not in the request"),
    (responses({"type": "input_file", "filename": "x", "file_data": "!!"}), "a file that is not valid base64"),
    (responses(AUDIO), "part of type 'input_audio' that is no WAV file"),
    (
        claude({"type": "document", "source": {"type": "url", "url": "https://x"}}),
        "document whose source is of type 'url'",
    ),
    (
        claude({"type": "document", "source": {"type": "base64", "data": "AA", "media_type": "a/b"}}),
        "a file that is not",
    ),
    (claude({"type": "audio", "source": {}}), "block of type 'audio'"),
    (responses({"type": "input_image", "file_id": "file-1", "detail": "auto"}), "part of type 'input_image'"),
    (responses({"type": "input_image", "image_url": None, "file_id": "file-1"}), "part of type 'input_image'"),
    (claude({"type": "image", "source": {"type": "file", "file_id": "file_1"}}), "block of type 'image'"),
]


@pytest.mark.parametrize(("request_", "told"), UNREAD)
def test_what_cannot_be_read_leaves_a_note(http: httpx.Client, request_: tuple[str, Any], told: str) -> None:
    path, body = request_
    answer = http.post(path, json={"model": "scripted", **body})
    assert answer.status_code == 200, answer.text
    assert f"Ignored: {told}" in answer.text and "I have read all of it." in answer.text


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"filename": "notes.txt", "file_data": NOTES}},
        {"type": "input_file", "filename": "notes.txt", "file_data": NOTES},
        {"type": "input_file", "filename": "notes.txt", "file_data": NOTES.partition(",")[2]},
    ],
)
@pytest.mark.parametrize("role", ["user", "tool", "assistant", "system"])
def test_text_files_are_read_in_every_role(part: dict[str, Any], role: str) -> None:
    assert openai_content([{"type": "text", "text": "See:"}, part], role) == "See:\nnotes.txt\nGrüße from the island"


@needs_pypdf
def test_pdfs_are_read_on_every_protocol(http: httpx.Client) -> None:
    """The prompt is longer by the file's text, however it is sent; a second time it is cached."""
    source = {"type": "base64", "media_type": "application/pdf", "data": b64(PDF)}
    requests = [
        chat({"type": "file", "file": {"filename": "t.pdf", "file_data": url(PDF, "application/pdf")}}),
        responses({"type": "input_file", "filename": "t.pdf", "file_data": url(PDF, "application/octet-stream")}),
        claude({"type": "document", "title": "t.pdf", "source": source}),
    ]
    counted = []
    for path, body in requests:
        answer = http.post(path, json={"model": "scripted", **body}).json()
        assert "warnings" not in str(answer)
        usage = answer["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        counted.append(usage.get("prompt_tokens") or usage["input_tokens"] + cached)
    assert counted[0] == counted[1] == counted[2] > 50
    shown = http.post("/apply-template", json={"model": "scripted", **requests[0][1]}).json()["prompt"]
    assert "t.pdf\nThe harbour closes at nine.\n\nThe ferry leaves at ten." in shown


@needs_pypdf
def test_a_broken_pdf_is_a_note() -> None:
    with pytest.raises(UnreadableError, match="cannot be read as PDF"):
        sent_file(b64(PDF[:90]), "t.pdf")
    assert "left out" in openai_content([{"type": "input_file", "file_data": b64(PDF[:90])}], "user")


def test_not_more_files_than_allowed_are_read() -> None:
    token = READ.set([])
    try:
        for _ in range(MAX_FILES):
            sent_file(b64(b"x"), "a.txt")
        with pytest.raises(UnreadableError, match="is more than"):
            sent_file(b64(b"x"), "a.txt")
    finally:
        READ.reset(token)


def test_names_of_files_stay_on_one_line() -> None:
    assert sent_file(b64(b"x"), "a\nb\x1b[1m.txt")[0].splitlines()[1:] == ["x"]


def test_images_of_users_are_still_checked(http: httpx.Client) -> None:
    for path, body in (
        chat({"type": "image_url", "image_url": {"url": "https://x/y.png"}}),
        responses({"type": "input_image", "image_url": "https://x/y.png"}),
    ):
        assert http.post(path, json={"model": "scripted", **body}).status_code == 400
    noted = openai_content([{"type": "image_url", "image_url": {"url": "https://x"}}], "assistant")
    assert noted.startswith("[image_url: left out")
