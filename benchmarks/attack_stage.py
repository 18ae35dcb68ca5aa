"""The environment of an attack: a home folder of its own, with servers and commands. Used by benchmarks/attack.py."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from cpu_kernels.kernel_cache import CACHE_VARIABLE, cache_root
from tests.gguf_files import copying, finish

PATIENCE_S = 300.0
MAIN = [sys.executable, "-c", "from localllm.cli.main import main; main()"]
BUILTIN = Path(__file__).resolve().parents[1] / "models/builtin"


class SkippedError(Exception):
    """An attack needs something that this machine does not provide."""


def check(held: bool, otherwise: str) -> None:
    """Raise AssertionError unless `held`, even if Python runs with assertions disabled."""
    if not held:
        raise AssertionError(otherwise)


@dataclass(frozen=True)
class Served:
    """A running server."""

    stage: "Stage"
    url: str
    process: "subprocess.Popen[bytes]"
    model: str
    other: str

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.url.rpartition(":")[2])

    def quiet(self) -> None:
        """Wait until the server uses no processor time."""
        process = psutil.Process(self.process.pid)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            before = sum(process.cpu_times()[:2])
            time.sleep(1)
            if sum(process.cpu_times()[:2]) - before < 0.2:
                return
        raise AssertionError("the server is still at work")


def answer_of(served: Served, model: str | None = None, prompt: str = "Once upon a time", length: int = 16) -> str:
    """The server's greedy answer to a prompt."""
    options = {"num_predict": length, "temperature": 0}
    body = {"model": model or served.model, "prompt": prompt, "raw": True, "stream": False, "options": options}
    answer = httpx.post(served.url + "/api/generate", json=body, timeout=PATIENCE_S)
    check(answer.status_code == httpx.codes.OK, answer.text[:300])
    return str(answer.json()["response"])


def with_template(source: Path, target: Path, template: str) -> None:
    """Write a copy of a model with another chat template."""
    reader, writer = copying(source, target, without=("tokenizer.chat_template",))
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)


class Stage:
    """A home folder with settings, models and caches of its own, for one attack."""

    key = "correct-horse-battery-staple"

    def __init__(self, home: Path, models: Sequence[Path]) -> None:
        """models: up to two models to serve; by default the built-in one and a copy with another template."""
        self.home = home
        builtin = next(BUILTIN.glob("*.gguf"))
        if not models:
            copy = home / "copy.gguf"
            with_template(builtin, copy, "{{ messages[-1].content }}")
        self.models = [*models, *([] if models else [builtin, copy])]
        self.key_file = home / "key"
        self.key_file.write_text(self.key)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of processes that run here."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("LOCALLLM_", "OLLAMA_", "HF_"))}
        folders = {f"XDG_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE")}
        fixed = {CACHE_VARIABLE: str(cache_root()), "LOCALLLM_KV_MIB": "64", "LOCALLLM_BACKEND": "native"}
        return inherited | {"HOME": str(self.home)} | folders | fixed

    @contextlib.contextmanager
    def serve(self, *flags: str, before: Sequence[str] = (), **variables: str) -> Iterator[Served]:
        """Start a server. before: a command line to prefix."""
        named = [flag for path in self.models for flag in ("--model", str(path))]
        log = self.home / "server.log"
        with log.open("wb") as told:
            process = subprocess.Popen(
                [*before, *MAIN, "serve", "--port", "0", *named, *flags],
                env=self.variables | variables, stdout=told, stderr=told, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not (found := re.search(r"(http://\S+)\n", log.read_text(errors="replace"))):
                check(process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-500:])
                time.sleep(0.05)
            names = [path.stem for path in self.models]
            yield Served(self, found[1], process, names[0], names[-1])
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()

    def command(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run a command and wait for it."""
        return subprocess.run(
            [*MAIN, *arguments], env=self.variables | variables, capture_output=True, text=True, check=False,
            timeout=PATIENCE_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[bytes]":
        """Start a command; the caller ends it."""
        silent = subprocess.DEVNULL
        return subprocess.Popen(
            [*MAIN, *arguments], env=self.variables | variables, stdin=silent, stdout=silent, stderr=silent
        )

    def kv_files(self) -> list[Path]:
        """Segments of the KV cache."""
        return sorted(self.home.rglob("*.kv"))

    def temporary(self) -> list[Path]:
        """Temporary files, in use or left behind."""
        return sorted({*self.home.rglob(".localllm-*"), *self.home.rglob("*.unfinished"), *self.home.rglob("*.tmp")})


def line_of(text: str) -> str:
    """The last line of a command's output, shortened."""
    lines = text.strip().splitlines() or ["(nothing)"]
    return json.dumps(lines[-1][-200:])[1:-1]
