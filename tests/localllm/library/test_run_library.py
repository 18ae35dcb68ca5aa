"""Models of other programs, run by their names in a separate home."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.localllm.library.conftest import write_file, write_hugging_face_model, write_ollama_model
from tests.localllm.library.model_server import ModelServer
from tests.localllm.library.test_lookup import snapshot

CHATML = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}"
    "<|im_start|>user\n{{ .Prompt }}<|im_end|>\n<|im_start|>assistant\n"
)
FLAGS = ("--raw", "--temperature", "0", "--max-tokens", "8", "--json", "--backend", "native", "--no-cache")


@pytest.fixture
def stories(data_dir: Path) -> bytes:
    return (data_dir / "models/gguf/stories260K-F32.gguf").read_bytes()


@pytest.fixture
def golden(data_dir: Path) -> list[int]:
    """Greedy ids of a float32 reference for "Once upon a time"."""
    reference = json.loads((data_dir / "models/golden.json").read_text(encoding="utf-8"))
    ids: list[int] = reference["files"]["stories260K-F32.gguf"][0]["np_greedy"][:8]
    return ids


@pytest.mark.slow
def test_list_finds_and_run_runs_all_and_nothing_is_changed(
    home: Path,
    stories: bytes,
    golden: list[int],
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_ollama_model(home / ".ollama/models", "registry.ollama.ai/library/stories/260k", {"model": stories})
    write_hugging_face_model(home / "huggingface/hub", "k/stories-GGUF", "stories-F32.gguf", stories)
    write_file(home / ".lmstudio/models/pub/repo/stories-F32.gguf", stories)
    write_file(home / "llama.cpp/u_r_stories-F32.gguf", stories)
    before = snapshot(home)
    assert command("list", "--json") == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert names == ["builtin", "stories:260k", "hf.co/k/stories-GGUF:F32", "pub/repo:F32", "u_r_stories-F32"]
    for name in names[1:]:
        assert command("run", name, "Once upon a time", *FLAGS) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out)["token_ids"] == golden
    assert snapshot(home) == before


@pytest.mark.slow
def test_run_pulls_what_is_not_here(
    server: ModelServer,
    stories: bytes,
    golden: list[int],
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.add_hub("k/s-GGUF", {"s-F32.gguf": stories})
    server.routes["/s.gguf"] = stories
    for name in ("hf.co/k/s-GGUF:F32", f"{server.url}/s.gguf"):
        assert command("run", name, "Once upon a time", *FLAGS) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out)["token_ids"] == golden
    server.requests.clear()
    assert command("run", "hf.co/k/s-GGUF", "Once upon a time", *FLAGS) == 0
    assert server.requests == []


@pytest.mark.slow
def test_ollamas_system_and_parameters_are_used(
    home: Path,
    stories: bytes,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    layers = {
        "model": stories,
        "template": CHATML.encode(),
        "system": b"Tell a story about a dog.",
        "params": b'{"temperature": 0, "num_predict": 5}',
    }
    write_ollama_model(home / ".ollama/models", "registry.ollama.ai/library/dog/1", layers)
    write_ollama_model(home / ".ollama/models", "registry.ollama.ai/library/plain/1", {"model": stories})
    chat = ("run", "dog:1", "Go on.", "--json", "--backend", "native", "--no-cache")
    assert command(*chat) == 0, capsys.readouterr().err
    first = json.loads(capsys.readouterr().out)
    assert first["completion_tokens"] == 5
    assert command(*chat, "--system", "x", "--max-tokens", "3") == 0
    second = json.loads(capsys.readouterr().out)
    assert second["completion_tokens"] == 3
    assert second["prompt_tokens"] < first["prompt_tokens"]
    shutil.rmtree(home / ".ollama")
