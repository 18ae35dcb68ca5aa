"""WAV files in every protocol that has a place for them, and what an answer tells of them."""

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from typer.testing import CliRunner

from localllm.cli.main import application
from tests.gguf_io.test_sounds import wav
from tests.picture_files import png
from tests.projector_files import write_projector
from tests.waiting import PATIENCE_S, eventually

WORDS, QUESTION = 12, "Once upon a time"


def hum(seconds: float = 1.0, rate: int = 16_000, seed: int = 1) -> bytes:
    return wav((0.2 * np.random.default_rng(seed).standard_normal(int(seconds * rate))).clip(-1, 1), rate=rate)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def folder(model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hearing")
    shutil.copyfile(model_files / "stories260K-F32.gguf", folder / "ear.gguf")
    write_projector(folder / "mmproj-ear.gguf", "gemma4uv", sound="gemma4ua")
    return folder


@pytest.fixture(scope="module")
def server(start_server: Any, folder: Path) -> Iterator[Any]:
    with start_server("--model", str(folder / "ear.gguf"), LOCALLLM_CTX="500") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def ask(client: httpx.Client, sound: object, role: str = "user") -> httpx.Response:
    parts = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": role, "content": parts}], "max_tokens": WORDS, "temperature": 0}
    return client.post("/v1/chat/completions", json={"model": "ear", **body})


def test_the_official_client_and_ollamas_protocol_get_the_same_answer(server: Any, client: httpx.Client) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": encoded(hum()), "format": "wav"}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        parts: Any = [sound, {"type": "text", "text": QUESTION}]
        chat = official.chat.completions.create(
            model="ear", messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=WORDS
        )
    text = chat.choices[0].message.content
    body = {"model": "ear", "stream": False, "options": {"temperature": 0, "num_predict": WORDS}}

    def ollama(*files: bytes) -> dict[str, Any]:
        message = {"role": "user", "content": QUESTION, "images": [encoded(file) for file in files]}
        reply = client.post("/api/chat", json={**body, "messages": [message]})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    heard, other, both = ollama(hum()), ollama(hum(seed=2)), ollama(png(1), hum())
    assert text and heard["message"]["content"] == text != other["message"]["content"]
    (told,) = heard["sounds"]
    assert told["seconds"] == 1.0 and told["tokens"] > 25 and "pictures" not in heard
    assert [next(iter(both[kind][0])) for kind in ("pictures", "sounds")] == ["width", "seconds"]
    again = ollama(hum() + b"LIST\x04\0\0\0abcd")  # the same samples in another file
    assert again["message"]["content"] == text
    assert again["prompt_eval_count"] == heard["prompt_eval_count"]


def test_another_rate_has_as_many_tokens(client: httpx.Client) -> None:
    usage = [ask(client, {"data": encoded(hum(2, rate))}).json()["usage"] for rate in (16_000, 8_000, 44_100)]
    assert len({used["prompt_tokens"] for used in usage}) == 1


@pytest.mark.parametrize(
    ("sound", "problem"),
    [
        ({"data": encoded(hum()[:-100])}, "The sound is cut off"),
        ({"data": encoded(hum(31))}, "lasts 31.0 s; this model hears at most 30 s"),
        ({"data": encoded(hum(29))}, "takes 725 tokens, more than the context of 500"),
    ],
)
def test_what_cannot_be_heard_is_one_sentence(sound: object, problem: str, client: httpx.Client) -> None:
    reply = ask(client, sound)
    message = reply.json()["error"]["message"]
    assert (reply.status_code, problem in message, "\n" in message) == (400, True, False), message


@pytest.mark.parametrize(
    "sound",
    [
        {"data": encoded(b"ID3" + bytes(40)), "format": "mp3"},
        {"data": encoded(png(1)), "format": "wav"},
        {"data": "%%%", "format": "wav"},
        {"data": "http://127.0.0.1:1/a.wav"},
        {"format": "wav"},
        "abc",
        {"data": ""},
    ],
)
def test_a_note_replaces_sound_that_is_not_wav(sound: object, client: httpx.Client) -> None:
    reply = ask(client, sound)
    assert reply.status_code == 200, reply.text
    assert "'input_audio' that is no WAV file" in reply.text


def test_a_model_tells_that_it_hears(client: httpx.Client) -> None:
    shown = client.post("/api/show", json={"model": "ear"}).json()
    assert shown["capabilities"] == ["completion", "vision", "audio"]


def test_the_page_attaches_sounds_and_pictures_of_any_format(client: httpx.Client, model_files: Path) -> None:
    webp = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(webp, "WEBP")
    sent = {"note.wav": (hum(), "audio/wav"), "red.webp": (webp.getvalue(), "image/webp")}
    files = [{"name": name, "data": encoded(data)} for name, (data, _) in sent.items()]
    body = {"model": "ear", "content": QUESTION, "files": files, "parameters": {"max_tokens": "2"}}
    begun = client.post("/api/chats", json=body)
    assert begun.status_code == 200, begun.text
    chat = f"/api/chats/{begun.json()['chat']}"
    eventually(lambda: client.get(chat).json()["state"] is None)
    message, answer = client.get(chat).json()["messages"]
    assert not answer["error"] and ["of sound" in seen for seen in answer["stats"]["pictures"]] == [True, False]
    for place, (data, kind) in enumerate(sent.values()):
        found = client.get(f"{chat}/messages/{message['id']}/files/{place}")
        assert (found.content, found.headers["content-type"]) == (data, kind)


def test_run_takes_a_sound_by_its_path_and_tells_what_was_heard(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "note.wav").write_bytes(hum(2))
    command = ["run", str(folder / "ear.gguf"), str(tmp_path / "note.wav"), QUESTION, "--max-tokens", "1"]
    told = CliRunner().invoke(application(), [*command, "--no-cache"])
    assert told.exit_code == 0 and "Sound 1: 2.0 s of sound, " in told.stderr, told.stderr
    as_json = json.loads(CliRunner().invoke(application(), [*command, "--no-cache", "--json"]).stdout)
    assert as_json["sounds"][0]["seconds"] == 2.0 and "pictures" not in as_json


def test_sound_for_a_projector_without_an_audio_encoder_is_refused(model_files: Path, tmp_path: Path) -> None:
    shutil.copyfile(model_files / "stories260K-F32.gguf", tmp_path / "eye.gguf")
    write_projector(tmp_path / "mmproj-eye.gguf", "gemma4uv")
    (tmp_path / "note.wav").write_bytes(hum())
    command = ["run", str(tmp_path / "eye.gguf"), str(tmp_path / "note.wav"), QUESTION, "--max-tokens", "1"]
    refused = CliRunner().invoke(application(), [*command, "--no-cache"])
    assert refused.exit_code and "hears no sound" in str(refused.exception) + refused.output
