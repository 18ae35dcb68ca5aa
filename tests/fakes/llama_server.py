"""llama-cpp-python's own server as a process: a real server that is not ours."""

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from localllm.remote.errors import RemoteError
from localllm.remote.server import remote_server
from localllm.settings import Settings

MISSING = [
    name
    for name in ("llama_cpp", "sse_starlette", "starlette_context", "pydantic_settings")
    if importlib.util.find_spec(name) is None
]
needs_server = pytest.mark.skipif(bool(MISSING), reason=f"llama-cpp-python's server needs {', '.join(MISSING)}")
START_SECONDS = 120


@contextmanager
def llama_server(model: Path, name: str, key: str, *arguments: str) -> Iterator[str]:
    """Serve a file under a name, and give the address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(model), "--model_alias", name]
    command += ["--port", str(port), "--n_ctx", "512", "--n_threads", "1", "--n_gpu_layers", "0", "--api_key", key]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            found = f"http://127.0.0.1:{port}"
            _wait(process, found, key)
            yield found
        finally:
            process.terminate()


def _wait(process: subprocess.Popen[bytes], address: str, key: str) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < end, "the server does not answer"
        try:
            remote_server(address, Settings(remote_key=key)).models()
            return
        except RemoteError:
            time.sleep(0.2)
