"""A server process on real tiny models, as a user starts it."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = "stories260K-Q8_0"
OTHER = "tinystories656K-Q8_0"
START_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Server:
    """A running `localllm serve`."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


StartServer = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture(scope="session", autouse=True)
def close_what_llama_cpp_leaves_open() -> Iterator[None]:
    """llama_cpp opens /dev/null twice when it is imported, and warnings of that come at the very end."""
    yield
    if utilities := sys.modules.get("llama_cpp._utils"):
        utilities.outnull_file.close()
        utilities.errnull_file.close()


@pytest.fixture(scope="session")
def model_files(data_dir: Path) -> Path:
    return data_dir / "models" / "gguf"


@pytest.fixture(scope="session")
def start_server(model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Start a server away from this user's settings, models and cached keys and values."""

    @contextlib.contextmanager
    def start(*arguments: str, models: tuple[str, ...] = (MODEL, OTHER), **environment: str) -> Iterator[Server]:
        home = tmp_path_factory.mktemp("home")
        kernels = os.environ.get("LOCALLLM_KERNEL_CACHE", str(Path.home() / ".cache" / "localllm" / "kernels"))
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("LOCALLLM_", "OLLAMA_"))}
        variables = inherited | {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "XDG_DATA_HOME": str(home / "data"),
            "LOCALLLM_KERNEL_CACHE": kernels,
            "LOCALLLM_BACKEND": "native",
            "LOCALLLM_THREADS": "1",
            "LOCALLLM_KV_MIB": "16",
            **environment,
        }
        served = [flag for name in models for flag in ("--model", str(model_files / f"{name}.gguf"))]
        command = [sys.executable, "-c", "from localllm.cli.main import main; main()", "serve"]
        process = subprocess.Popen(
            [*command, "--port", "0", *served, *arguments],
            env=variables,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        try:
            yield Server(_address(process), process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            finally:
                process.kill()
                process.wait()
                assert process.stderr
                process.stderr.close()

    return start


def _address(process: subprocess.Popen[bytes]) -> str:
    """The URL that the server announces on stderr."""
    assert process.stderr
    said = b""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        readable, _, _ = select.select([process.stderr], [], [], 1.0)
        if readable:
            piece = os.read(process.stderr.fileno(), 4096)
            said += piece
            if found := re.search(rb"(http://\S+)\n", said):
                return found[1].decode()
            if not piece:
                break
    pytest.fail(f"the server did not start: {said.decode(errors='replace')}")


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> Iterator[Server]:
    """One server for all tests that leave it as it was."""
    with start_server() as running:
        yield running
