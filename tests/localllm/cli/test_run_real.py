"""localllm run in its own process, on a real tiny model."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forking import PROGRAM, Forked, Nursery
from tests.systems import own_places
from tests.waiting import eventually

PROMPT = "Once upon a time"
Start = Callable[..., Forked]

llama = pytest.param(
    "llama",
    marks=[
        pytest.mark.oracle,
        pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="the llama extra is not installed"),
    ],
)
each_backend = pytest.mark.parametrize("backend", [llama, "native"])


@pytest.fixture
def model(data_dir: Path) -> Path:
    return data_dir / "models" / "gguf" / "stories260K-F32.gguf"


# Prologue that slows the program to ten steps per second, so that the answer lasts long enough for the test.
SLOWLY = """
import time
from localllm.engine.engine import Engine
step = Engine.step
Engine.step = lambda engine: (time.sleep(0.1), step(engine))[1]
"""


@pytest.fixture
def start(children: Nursery, tmp_path: Path) -> Start:
    """Start localllm run, isolated from this user's settings. begins: Python code that the program runs first."""

    def call(backend: str, *arguments: str, begins: str = "") -> Forked:
        own = {"LOCALLLM_BACKEND": backend, **own_places(tmp_path)}
        return children.start(f"{begins}\n{PROGRAM}", ["run", *arguments], {**os.environ, **own})

    return call


@each_backend
def test_greedy_answer_is_the_float32_references(backend: str, model: Path, start: Start, data_dir: Path) -> None:
    golden = json.loads((data_dir / "models" / "golden.json").read_text(encoding="utf-8"))
    reference = golden["files"][model.name][0]
    assert reference["prompt"] == PROMPT
    process = start(backend, str(model), PROMPT, "--temperature", "0", "--max-tokens", "60", "--json")
    out, err = process.communicate()
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["token_ids"] == reference["np_greedy"]
    # The text that llama2.c prints for the same weights.
    assert golden["karpathy_expected_stdout_260K_200steps"].startswith(PROMPT + result["text"])
    assert result["prompt_tokens"] == len(reference["ids"])
    assert result["completion_tokens"] == 60
    assert result["finish_reason"] == "length"


@each_backend
def test_a_seed_repeats_the_answer(backend: str, model: Path, start: Start) -> None:
    answers = {
        start(backend, str(model), PROMPT, "--seed", "5", "--max-tokens", "30").communicate()[0] for _ in range(2)
    }
    assert len(answers) == 1
    assert answers != {b""}


@each_backend
def test_an_answer_fits_the_schema_given_on_the_command_line(backend: str, model: Path, start: Start) -> None:
    digit = {"enum": [3, 5, 7]}
    schema = {"type": "object", "properties": {"n": digit}, "required": ["n"], "additionalProperties": False}
    out, err = start(backend, str(model), PROMPT, "--format", json.dumps(schema), "--seed", "1").communicate()
    assert json.loads(out)["n"] in {3, 5, 7}, err
    process = start(backend, str(model), PROMPT, "--format", '{"type": "objekt"}')
    out, err = process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert b"objekt" in err and b"Traceback" not in err


@each_backend
def test_ctrl_c_stops_and_keeps_the_text(backend: str, model: Path, start: Start) -> None:
    process = start(backend, str(model), PROMPT, "--ignore-eos", "--temperature", "2", begins=SLOWLY)
    eventually(process.out.read_bytes)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert len(out) > 1 and out.endswith(b"\n")
    assert b"Traceback" not in err


@each_backend
def test_a_reader_that_leaves_ends_the_command_quietly(backend: str, model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"{SLOWLY}\n{PROGRAM}", "run", str(model), PROMPT, "--ignore-eos"]
    environment = {**os.environ, "LOCALLLM_BACKEND": backend, **own_places(tmp_path)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--temperature", "2"], env=environment, **pipes) as process:
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141
    assert b"Traceback" not in err


@each_backend
def test_a_prompt_beyond_the_context_is_refused(backend: str, model: Path, start: Start) -> None:
    process = start(backend, str(model), PROMPT, "--ctx", "4")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert b"The prompt has 5 tokens and the context holds 4." in err


def test_what_cannot_be_loaded_is_refused_in_a_sentence(model: Path, start: Start, tmp_path: Path) -> None:
    data = model.read_bytes().replace(b"llama", b"lambo")
    key = data.index(b"tokenizer.ggml.model")
    (tmp_path / "unknown.gguf").write_bytes(data[:key] + data[key:].replace(b"lambo", b"llama", 1))
    (tmp_path / "foreign.gguf").write_bytes(model.read_bytes().replace(b"llama", b"lambo", 1))
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:200_000])
    (tmp_path / "text.gguf").write_text("this is not a model at all", encoding="utf-8")
    for name, words in (
        ("missing.gguf", b"No such file"),
        ("text.gguf", b"not a GGUF file"),
        ("cut.gguf", b"the file has 200000"),
        ("unknown.gguf", b"'lambo'"),
        ("foreign.gguf", b"'lambo'"),
    ):
        process = start("native", str(tmp_path / name), PROMPT, "--json")
        out, err = process.communicate()
        assert (process.returncode, out) == (2, b""), err
        assert words in err, err
        assert err.startswith(b"error: "), err
        assert b"Traceback" not in err
