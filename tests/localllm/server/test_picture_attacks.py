"""Pictures that are bombs, damaged, false or many: one sentence on every protocol, and the server goes on."""

import base64
import io
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from tests.picture_files import chunk, png
from tests.projector_files import write_projector
from tests.waiting import PATIENCE_S

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(start_server: Any, model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("seeing")
    shutil.copyfile(model_files / "stories260K-F32.gguf", folder / "seer.gguf")
    write_projector(folder / "mmproj-seer.gguf", "gemma4uv")
    with start_server("--model", str(folder / "seer.gguf"), LOCALLLM_IMAGE_MAX_TOKENS="16") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def bomb(width: int, height: int, rows: int = 1 << 20) -> bytes:
    """A PNG of one colour, most of which is not there."""
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(rows))) + chunk(b"IEND", b"")
    )


def animation(frames: int) -> bytes:
    file = io.BytesIO()
    images = [Image.new("P", (2000, 2000), number % 2) for number in range(frames)]
    images[0].save(file, "GIF", save_all=True, append_images=images[1:])
    return file.getvalue()


BAD = {
    "huge": (bomb(100_000, 100_000), "100,000 x 100,000 pixels; the most are"),
    "wide": (bomb(1 << 30, 1), "pixels; the most are"),
    "half": (png(1)[:60], "damaged"),
    "false": (b"\x89PNG\r\n\x1a\n" + b"no picture" * 9, "damaged|unknown format"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG"),
    "pdf": (b"%PDF-1.7\n", "a PDF"),
    "heic": (b"\x00\x00\x00\x18ftypheic" + bytes(40), "HEIC"),
    "text": (b"Hello", "unknown format"),
    "empty": (b"", "empty"),
}


def bodies(data: bytes) -> dict[str, dict[str, Any]]:
    """A question about a picture in every protocol."""
    text = base64.b64encode(data).decode()
    url = f"data:image/png;base64,{text}"
    source = {"type": "base64", "media_type": "image/png", "data": text}
    chat = [{"type": "image_url", "image_url": {"url": url}}]
    return {
        "/api/chat": {"messages": [{"role": "user", "content": "?", "images": [text]}]},
        "/api/generate": {"prompt": "?", "images": [text]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": chat}], "max_tokens": 1},
        "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        "/v1/messages": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            "max_tokens": 1,
        },
    }


def send(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    return client.post(path, json={"model": "seer", "stream": False, "options": {"num_predict": 1}, **body})


@pytest.mark.parametrize("kind", BAD)
def test_bad_pictures_are_refused_in_one_sentence_on_every_protocol(
    client: httpx.Client, server: Any, kind: str
) -> None:
    data, words = BAD[kind]
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    for path, body in bodies(data).items():
        reply = send(client, path, body)
        assert reply.status_code == 400, (path, reply.text)
        assert any(word in reply.text for word in words.split("|")), (path, reply.text)
        assert len(reply.text) < 400 and "Traceback" not in reply.text
    assert process.memory_info().rss < before + 64 * MIB
    assert send(client, "/api/chat", bodies(png(2))["/api/chat"]).status_code == 200


def test_an_animation_shows_its_first_frame(client: httpx.Client) -> None:
    reply = send(client, "/api/chat", bodies(animation(60))["/api/chat"])
    assert reply.status_code == 200 and reply.json()["pictures"][0]["width"] == 2000


def test_ten_thousand_pictures_are_refused_before_they_are_all_read(client: httpx.Client) -> None:
    text = base64.b64encode(png(1)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text[:200]}{text[200:]}"}}
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}}
    many = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [part] * 10_000}]},
        "/v1/messages": {"messages": [{"role": "user", "content": [source] * 10_000}], "max_tokens": 1},
        "/api/chat": {"messages": [{"role": "user", "content": "?", "images": [text]} for _ in range(10_000)]},
    }
    for path, body in many.items():
        reply = send(client, path, body)
        assert reply.status_code in (400, 413) and len(reply.text) < 400, (path, reply.text[:300])


def test_a_killed_decoder_is_said_and_the_next_picture_is_read(client: httpx.Client, server: Any) -> None:
    assert send(client, "/api/chat", bodies(png(3))["/api/chat"]).status_code == 200
    children = psutil.Process(server.process.pid).children(recursive=True)
    decoders = [child for child in children if "gguf_io.media_worker" in child.cmdline()]
    assert decoders
    for child in decoders:
        child.kill()
    psutil.wait_procs(decoders, timeout=10)
    statuses = [send(client, "/api/chat", bodies(png(seed))["/api/chat"]).status_code for seed in (4, 5)]
    assert statuses[-1] == 200 and set(statuses) <= {200, 400}
