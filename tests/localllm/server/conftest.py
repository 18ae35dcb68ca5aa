"""A server process on real tiny models. tests/e2e starts the command itself."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.forking import PROGRAM, Forked, Nursery
from tests.systems import own_places
from tests.waiting import PATIENCE_S, eventually

MODEL = "stories260K-Q8_0"
OTHER = "tinystories656K-Q8_0"

# Prologue that slows the engine to ten steps per second, one token each, so that work does not finish before a test has
# seen it, however busy the machine.
SLOWLY = """
import time
from localllm.engine.engine import Engine
from localllm.engine.speculation import DraftLength
DraftLength.choose = lambda *_: 0
step = Engine.step
Engine.step = lambda engine: (time.sleep(0.1), step(engine))[1]
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A running `localllm serve`, and its log file."""

    url: str
    process: Forked

    @property
    def log(self) -> Path:
        return self.process.err

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


StartServer = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture(scope="session", autouse=True)
def close_what_llama_cpp_leaves_open() -> Iterator[None]:
    """llama_cpp opens /dev/null twice when imported, and Python warns about that at exit."""
    yield
    if utilities := sys.modules.get("llama_cpp._utils"):
        utilities.outnull_file.close()
        utilities.errnull_file.close()


@pytest.fixture(scope="session")
def model_files(data_dir: Path) -> Path:
    return data_dir / "models" / "gguf"


@pytest.fixture(scope="session")
def start_server(model_files: Path, children: Nursery, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Start a server isolated from this user's settings, models and KV cache."""

    @contextlib.contextmanager
    def start(
        *arguments: str, models: tuple[str, ...] = (MODEL, OTHER), begins: str = "", **environment: str
    ) -> Iterator[Server]:
        """begins: Python code that the program runs first."""
        home = tmp_path_factory.mktemp("home")
        kernels = os.environ.get("LOCALLLM_KERNEL_CACHE", str(Path.home() / ".cache" / "localllm" / "kernels"))
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("LOCALLLM_", "OLLAMA_"))}
        variables = inherited | {
            **own_places(home),
            "LOCALLLM_KERNEL_CACHE": kernels,
            "LOCALLLM_BACKEND": "native",
            "LOCALLLM_THREADS": "1",
            "LOCALLLM_KV_MIB": "16",
            **environment,
        }
        served = [flag for name in models for flag in ("--model", str(model_files / f"{name}.gguf"))]
        process = children.start(f"{begins}\n{PROGRAM}", ["serve", "--port", "0", *served, *arguments], variables)
        try:
            yield Server(_address(process), process)
        finally:
            process.terminate()
            try:
                process.wait()
            finally:
                process.kill()

    return start


def _address(process: Forked) -> str:
    """The URL that the server announces."""

    def announced() -> re.Match[str] | None:
        return re.search(r"(http://\S+)\n", process.err.read_text(encoding="utf-8", errors="replace"))

    eventually(lambda: announced() or process.poll() is not None, "the server does not start")
    found = announced()
    assert found, f"the server did not start: {process.err.read_text(encoding='utf-8', errors='replace')}"
    return found[1]


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> Iterator[Server]:
    """One server for all tests that do not change it."""
    with start_server() as running:
        body = {"model": MODEL, "stream": False}
        assert httpx.post(f"{running.url}/api/generate", json=body, timeout=PATIENCE_S).status_code == 200
        yield running
