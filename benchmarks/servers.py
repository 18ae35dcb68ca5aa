"""Servers in processes of their own, for benchmarks that use HTTP."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from cpu_kernels.kernel_cache import CACHE_VARIABLE, cache_root

START_S = 600
STOP_S = 60


@dataclass(frozen=True, slots=True)
class Server:
    """A listening server, its process and its log. model: the name to request."""

    name: str
    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def said(self, start: int = 0) -> str:
        """What it has logged from a byte on; the log's own position does not change."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace")


@contextlib.contextmanager
def localllm(
    model: Path,
    threads: int,
    kv_mib: int | None = None,
    others: Sequence[Path] = (),
    *,
    flags: Sequence[str] = (),
    speculates: bool = True,
    home: Path | None = None,
    parallel: int | None = None,
    begins: str = "",
) -> Iterator[Server]:
    """`localllm serve` of one file and others, isolated from this user's settings, models and cached keys and values.

    home: a folder for the disk cache of keys and values, shared by successive servers; None means no disk cache.
    begins: code that the server's process runs first.
    """
    plainly = ["-m", "benchmarks.serve_plainly"]
    usually = ["-c", f"{begins}\nfrom localllm.cli.main import main; main()"]
    command = [sys.executable, *(usually if speculates else plainly), "serve", "--model", str(model)]
    command += [argument for other in others for argument in ("--model", str(other))]
    command += ["--threads", str(threads), "--keep-alive", "-1", *flags]
    with tempfile.TemporaryDirectory() as fresh:
        place = fresh if home is None else str(home)
        own = {"HOME": place, **{f"XDG_{kind}_HOME": place for kind in ("CONFIG", "DATA", "CACHE")}}
        # No figure includes compiling kernels, so the kernel cache is shared.
        own |= {CACHE_VARIABLE: str(cache_root()), "LOCALLLM_DISK_CACHE": "false" if home is None else "true"}
        own |= {"LOCALLLM_KV_MIB": str(kv_mib)} if kv_mib else {}
        own |= {"LOCALLLM_PARALLEL": str(parallel)} if parallel else {}
        name = "localllm" if speculates else "localllm, no speculation"
        with _running(name, command, own, "/health", model.name.removesuffix(".gguf")) as server:
            yield server


@contextlib.contextmanager
def sleeping(model: Path, parallel: int) -> Iterator[Server]:
    """`localllm serve` of a file's tokenizer on a device that only sleeps (benchmarks.steps)."""
    command = [sys.executable, "-m", "benchmarks.steps", "serve", "--model", str(model), "--keep-alive", "-1"]
    with tempfile.TemporaryDirectory() as home:
        own = {"HOME": home, **{f"XDG_{kind}_HOME": home for kind in ("CONFIG", "DATA", "CACHE")}}
        own |= {CACHE_VARIABLE: str(cache_root()), "LOCALLLM_DISK_CACHE": "false"}
        own["LOCALLLM_PARALLEL"] = str(parallel)
        with _running("localllm", command, own, "/health", model.name.removesuffix(".gguf")) as server:
            yield server


@contextlib.contextmanager
def llama_server(
    program: str, model: Path, threads: int, context: int, slots: int = 1, *, flags: Sequence[str] = ()
) -> Iterator[Server]:
    """llama.cpp's own server of the same file. context: tokens per slot. slots: answers at once."""
    command = [program, "--model", str(model), "--alias", "peer", "--ctx-size", str(context * slots)]
    command += ["--parallel", str(slots), "--threads", str(threads), "--threads-batch", str(threads)]
    command += ["--gpu-layers", "0", "--no-ui", "--offline", *flags]
    with _running("llama-server", command, {}, "/health", "peer") as server:
        yield server


@contextlib.contextmanager
def llama_cpp(
    python: str, model: Path, threads: int, context: int, flags: Sequence[str] = ("--verbose", "false")
) -> Iterator[Server]:
    """llama-cpp-python's server of the same file. python: an interpreter that has it with its `server` extra."""
    command = [python, "-m", "llama_cpp.server", "--model", str(model), "--n_ctx", str(context)]
    command += ["--n_threads", str(threads), "--n_threads_batch", str(threads), "--n_gpu_layers", "0"]
    # By default a request interrupts the one before it, and flash attention is off, unlike llama.cpp's default.
    command += ["--interrupt_requests", "false", "--flash_attn", "true", *flags]
    with _running("llama-cpp-python", command, {}, "/v1/models", "peer") as server:
        yield server


@contextlib.contextmanager
def _running(name: str, command: list[str], variables: dict[str, str], path: str, model: str) -> Iterator[Server]:
    port = _free_port()
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("LOCALLLM_", "OLLAMA_"))}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=inherited | variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url + path)
            yield Server(name, url, model, process, log)
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-40_000:].decode(errors="replace"))
            raise
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=10).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server at {url} did not start")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
