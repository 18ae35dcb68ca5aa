"""Workers on other machines: a real one if this build of llama.cpp supports them, otherwise the errors."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_offload.errors import DeviceRequestError, LlamaCppMissingError
from gpu_offload.library import ABORTED
from gpu_offload.rpc import add_workers, can_reach_workers
from tests.fakes.rpc_worker import rpc_worker
from tests.oracle import llama_oracle
from tests.systems import own_places

pytestmark = llama_oracle.needs_llama


@pytest.fixture(scope="module")
def built_in() -> None:
    if not can_reach_workers():
        pytest.skip("this build of llama.cpp has no RPC; CMAKE_ARGS=-DGGML_RPC=on makes one that has")


@pytest.fixture(scope="module")
def worker(built_in: None) -> Iterator[str]:
    with rpc_worker() as address:
        yield address


@pytest.fixture(scope="module")
def model(data_dir: Path) -> str:
    return str(data_dir / "models" / "gguf" / "stories260K-F32.gguf")


def localllm(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    """Run in its own process: workers stay devices of the process that added them."""
    environment = {**os.environ, **own_places(folder)}
    command = [sys.executable, "-c", "from localllm.cli.main import main; main()", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, stdin=subprocess.DEVNULL, check=False)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:0", "host:99999", "http://host:1", "a b:1"])
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(DeviceRequestError, match="give host:port"):
        add_workers([address])


def test_a_build_without_workers_says_how_to_get_one() -> None:
    if can_reach_workers():
        pytest.skip("this build of llama.cpp has RPC")
    with pytest.raises(LlamaCppMissingError, match=r"CMAKE_ARGS.*-DGGML_RPC=on.* .*pip install .*llama-cpp-python==\d"):
        add_workers(["127.0.0.1:9"])


def test_an_absent_worker_does_not_end_the_process(built_in: None) -> None:
    with pytest.raises(DeviceRequestError, match=r"127.0.0.1:9 cannot be used(.|\n)*Failed to connect"):
        add_workers(["127.0.0.1:9"])


def test_somebody_else_there_does_not_end_it_either(built_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_offload.rpc._TRY_SECONDS", 3)
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, pytest.raises(DeviceRequestError, match="does not answer within 3 s"):
        add_workers([f"127.0.0.1:{silent.getsockname()[1]}"])


def test_a_worker_that_sends_nonsense_is_refused(built_in: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as liar:
        threading.Thread(target=_send_nonsense, args=(liar,), daemon=True).start()
        with pytest.raises(DeviceRequestError, match="cannot be used"):
            add_workers([f"127.0.0.1:{liar.getsockname()[1]}"])


def _send_nonsense(liar: socket.socket) -> None:
    connection, _ = liar.accept()
    with connection:
        connection.recv(1)
        connection.sendall(bytes(range(256)) * 16)


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_answer_with_one_line(built_in: None, model: str, tmp_path: Path) -> None:
    """llama.cpp ends the process; what is stored is complete (tests/e2e/test_abort.py)."""
    with rpc_worker() as address:
        command = [
            sys.executable,
            "-c",
            "from localllm.cli.main import main; main()",
            "run",
            model,
            "Once upon",
            "--raw",
        ]
        environment = {**os.environ, **own_places(tmp_path)}
        answer = subprocess.Popen(
            [*command, "--rpc", address, "--max-tokens", "400"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert answer.stdout is not None
        assert answer.stdout.read(8)
    _, said = answer.communicate()
    assert answer.returncode == -signal.SIGABRT
    last = said.decode().splitlines()[-1]
    assert last.startswith(ABORTED) and "Remote RPC server" in last


@pytest.mark.slow
def test_a_worker_computes_what_this_machine_would(worker: str, model: str, tmp_path: Path) -> None:
    greedy = ("run", model, "Once upon a time", "--raw", "--temperature", "0", "--max-tokens", "24", "--json")
    here = localllm(tmp_path, *greedy, "--backend", "llama")
    there = localllm(tmp_path, *greedy, "--rpc", worker)
    assert (here.returncode, there.returncode) == (0, 0), there.stderr.decode()
    local, remote = json.loads(here.stdout), json.loads(there.stdout)
    assert remote["token_ids"] == local["token_ids"] and len(local["token_ids"]) == 24
    assert remote["backend"] == "llama.cpp" and "rpc set" in remote["backend_reason"]
    assert f"worker {worker}" in remote["backend_reason"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["layer", "row", "none"])
def test_two_workers_share_a_model(worker: str, model: str, tmp_path: Path, mode: str) -> None:
    greedy = ("run", model, "Once upon a time", "--raw", "--temperature", "0", "--max-tokens", "24", "--json")
    here = localllm(tmp_path, *greedy, "--backend", "llama")
    with rpc_worker() as other:
        there = localllm(tmp_path, *greedy, "--rpc", f"{worker},{other}", "--split-mode", mode)
    assert (here.returncode, there.returncode) == (0, 0), there.stderr.decode()
    local, remote = json.loads(here.stdout), json.loads(there.stdout)
    assert remote["token_ids"] == local["token_ids"] and len(local["token_ids"]) == 24
    # If one of two has room for everything, only it is used, unless rows are requested.
    assert (other in remote["backend_reason"] and worker in remote["backend_reason"]) is (mode == "row")


@pytest.mark.slow
def test_the_plan_shows_the_worker(worker: str, model: str, tmp_path: Path) -> None:
    shown = localllm(tmp_path, "plan", model, "--rpc", worker, "--json")
    made: dict[str, Any] = json.loads(shown.stdout)
    assert made["uses"][1]["place"] == f"worker {worker}"
    assert made["uses"][1]["weights"] > 0 and made["backend"] == "llama.cpp"
