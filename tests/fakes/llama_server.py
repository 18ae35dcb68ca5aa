"""llama.cpp's two servers as processes, as real foreign servers: llama-cpp-python's own, and llama-server."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from localllm.remote.connection import RemoteError
from localllm.remote.openai import OpenAIServer
from localllm.settings import Settings
from tests.fakes.ports import free_port
from tests.waiting import eventually

MISSING = [
    name
    for name in ("llama_cpp", "sse_starlette", "starlette_context", "pydantic_settings")
    if importlib.util.find_spec(name) is None
]
needs_server = pytest.mark.skipif(bool(MISSING), reason=f"llama-cpp-python's server needs {', '.join(MISSING)}")

VARIABLE = "TEST_LLAMA_SERVER"
PROGRAM = shutil.which(os.environ.get(VARIABLE, ""))
needs_program = pytest.mark.skipif(
    PROGRAM is None, reason=f"no llama-server; set {VARIABLE} to the program (docs/remote.md says how to build it)"
)
SLOT_TOKENS = 2048
CALL = {"role": "assistant", "content": "<tool_call>\n"}


@contextlib.contextmanager
def llama_server(model: Path, name: str, key: str, *arguments: str) -> Iterator[str]:
    """Serve a file under a name with llama-cpp-python, and yield the address."""
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(model), "--model_alias", name]
    command += ["--n_ctx", "512", "--n_threads", "1", "--n_gpu_layers", "0", "--api_key", key]
    with _running([*command, *arguments], key) as address:
        yield address


@contextlib.contextmanager
def llama_program(model: Path, name: str, key: str, *arguments: str) -> Iterator[str]:
    """Serve a file under a name with llama-server, and yield the address. key: empty for none."""
    assert PROGRAM is not None
    command = [PROGRAM, "--model", str(model), "--alias", name, "--offline", "--no-ui"]
    command += ["--api-key", key] if key else []
    with _running([*command, "--threads", "1", "--gpu-layers", "0", *arguments], key) as address:
        yield address


@contextlib.contextmanager
def llama_stories(data_dir: Path, projector: Path, key: str) -> Iterator[str]:
    """Serve a small model as "stories" with llama-server, and yield the address.

    It has two slots of SLOT_TOKENS, a projector, and a template with tools that begins every answer with reasoning. The
    model does not know tools, so a test that needs a call begins the answer with CALL.
    """
    model = data_dir / "models" / "gguf" / "stories260K-F32.gguf"
    slots = ("--parallel", "2", "--ctx-size", str(2 * SLOT_TOKENS))
    slots += ("--override-kv", f"llama.context_length=int:{SLOT_TOKENS}")
    template = ("--jinja", "--chat-template-file", str(data_dir / "templates" / "Qwen3.5-4B.jinja"))
    with llama_program(model, "stories", key, *slots, *template, "--mmproj", str(projector)) as address:
        yield address


@contextlib.contextmanager
def _running(command: Sequence[str], key: str) -> Iterator[str]:
    port = free_port()
    quiet = subprocess.DEVNULL
    with subprocess.Popen([*command, "--port", str(port)], stdout=quiet, stderr=quiet) as process:
        try:
            found = f"http://127.0.0.1:{port}"
            _wait(process, found, key)
            yield found
        finally:
            process.terminate()


def _wait(process: subprocess.Popen[bytes], address: str, key: str) -> None:
    def answers() -> bool:
        assert process.poll() is None, "the server ended"
        try:
            OpenAIServer.at(address, Settings(remote_key=key)).models()
        except RemoteError:
            return False
        return True

    eventually(answers, "the server does not answer")
