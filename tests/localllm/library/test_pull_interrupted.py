"""Pulls that are killed, and concurrent pulls, as separate processes."""

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.library.lookup import users_models
from localllm.library.partial import bytes_noted
from localllm.settings import Settings
from tests.forking import Forked, Nursery
from tests.localllm.library.model_server import Answer, ModelServer, cut
from tests.systems import KILL, KILLED
from tests.waiting import PATIENCE_S

# Like the command, but with small chunks that are recorded often.
SCRIPT = """
import sys
import localllm.library.partial as partial, localllm.library.web as web
partial.CHUNK_BYTES, partial.CHECKPOINT_S, web.LONGEST_WAIT_S = 64 << 10, 0.01, 0.02
from localllm.cli.main import main
sys.argv[1:] = ["pull", *sys.argv[1:]]
main()
"""


Start = Callable[[str], Forked]


@pytest.fixture
def start(children: Nursery, server: ModelServer) -> Start:
    """Start pulling a model from the server into the current home."""
    return lambda name: children.start(SCRIPT, [name])


def slowly(_path: str, answer: Answer) -> None:
    answer.pause_s = 0.01


def wait_for_bytes(server: ModelServer, process: Forked, count: int) -> None:
    while process.poll() is None and len(server.fetched("/blobs/")) + len(server.fetched("/resolve/")) < count:
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ollama", "hub"])
def test_a_pull_that_is_killed_again_and_again_ends_with_the_right_file(
    server: ModelServer, home: Path, big_gguf: bytes, start: Start, kind: str
) -> None:
    """25 times by each protocol: kill -9, Ctrl-C, or a closed connection, at random moments."""
    chance = random.Random(kind)
    server.faults.append(slowly)
    server.add_ollama("library/big", "latest", {"model": big_gguf, "system": b"x"})
    server.add_hub("user/big", {"big-Q8_0.gguf": big_gguf})
    name = f"{server.host}/library/big" if kind == "ollama" else "hf.co/user/big"
    interrupted = 0
    while interrupted < 25:
        server.requests.clear()
        process = start(name)
        wait_for_bytes(server, process, chance.randrange(1, 6))
        time.sleep(chance.random() * 0.05)
        blow = chance.choice([KILL, KILL, signal.SIGINT, None])
        if blow is None:
            server.faults.append(cut(5, chance.randrange(60_000)))
            time.sleep(0.05)
            blow = KILL
        process.send_signal(blow)
        _, err = process.communicate()
        assert process.returncode in (0, KILLED, -signal.SIGINT, 130), err
        interrupted += process.returncode != 0
        for model in users_models(Settings()):  # it ended before the kill: complete or absent; start again
            assert model.path.read_bytes() == big_gguf
            shutil.rmtree(home / "localllm")
    server.faults.clear()
    process = start(name)
    _, err = process.communicate()
    assert process.returncode == 0, err
    (model,) = users_models(Settings())
    assert model.path.read_bytes() == big_gguf
    partial = home / "localllm/models/partial"
    assert [path for path in partial.iterdir() if path.suffix in (".part", ".json")] == []


KILLED_AFTER_THE_MOVE = (
    f"KILL = {KILL:d}"
    + """
import os
from pathlib import Path
import localllm.library.partial as partial
def killed(folder):
    if folder.name == "blobs" and any(folder.glob("sha256-*")):
        os.kill(os.getpid(), KILL)
partial.sync_folder = killed
"""
)


def test_a_kill_right_after_a_file_moved_to_its_place_leaves_nothing(
    server: ModelServer, home: Path, big_gguf: bytes, children: Nursery
) -> None:
    server.add_ollama("library/big", "latest", {"model": big_gguf})
    name = f"{server.host}/library/big"
    process = children.start(KILLED_AFTER_THE_MOVE + SCRIPT, [name])
    process.communicate()
    assert process.returncode == KILLED
    partial = home / "localllm/models/partial"
    assert len(list(partial.glob("*.json"))) == 1
    process = children.start(SCRIPT, [name])
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert [path for path in partial.iterdir() if path.suffix in (".part", ".json")] == []


def test_a_killed_pull_resumes(server: ModelServer, home: Path, big_gguf: bytes, start: Start) -> None:
    server.faults.append(slowly)
    server.add_ollama("library/big", "latest", {"model": big_gguf})
    process = start(f"{server.host}/library/big")
    wait_for_bytes(server, process, 40)
    process.kill()
    process.communicate()
    server.requests.clear()
    server.faults.clear()
    process = start(f"{server.host}/library/big")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert len(server.fetched("/blobs/")) < 40
    (model,) = users_models(Settings())
    assert model.path.read_bytes() == big_gguf


def test_a_kill_on_a_slow_link_loses_less_than_a_chunk(
    server: ModelServer, home: Path, big_gguf: bytes, children: Nursery
) -> None:
    """Killed repeatedly within one chunk of 8 MiB, a pull still completes."""
    server.faults.append(slowly)
    digest = server.add_ollama("library/big", "latest", {"model": big_gguf})["model"]
    note = home / f"localllm/models/partial/{digest.replace(':', '-')}.json"
    script = SCRIPT.replace("partial.CHUNK_BYTES", "unchanged")
    kept = [0]
    for _ in range(4):
        process = children.start(script, [f"{server.host}/library/big"])
        while process.poll() is None and (have := bytes_noted(note.parent, note.stem)) <= kept[-1]:
            time.sleep(0.002)
        process.kill()
        process.communicate()
        kept.append(have)
    server.requests.clear()
    server.faults.clear()
    process = children.start(script, [f"{server.host}/library/big"])
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert 0 < kept[1] < kept[2] < kept[3] < kept[4] < len(big_gguf) < 8 << 20
    first = min(int(headers["range"][6:].partition("-")[0]) for headers in server.fetched("/blobs/"))
    assert first >= kept[-1]
    (model,) = users_models(Settings())
    assert model.path.read_bytes() == big_gguf


def test_one_download_serves_all_processes(server: ModelServer, home: Path, big_gguf: bytes, start: Start) -> None:
    server.faults.append(slowly)
    server.add_ollama("library/big", "latest", {"model": big_gguf})
    processes = [start(f"{server.host}/library/big") for _ in range(3)]
    for process in processes:
        _, err = process.communicate()
        assert process.returncode == 0, err
        assert b"\r" not in err.replace(os.linesep.encode(), b"\n")  # progress is shown on terminals only
    ranges = [headers["range"] for headers in server.fetched("/blobs/")]
    assert len(set(ranges)) == len(ranges) == 1 + -(-len(big_gguf) // (64 << 10))
    (model,) = users_models(Settings())
    assert model.path.read_bytes() == big_gguf


def test_ctrl_c_says_how_to_go_on(server: ModelServer, home: Path, big_gguf: bytes, start: Start) -> None:
    stopped = threading.Event()

    def hold(_path: str, _answer: Answer) -> None:
        """Serve some chunks, and no more until the pull has stopped."""
        if len(server.fetched("/blobs/")) > 10:
            stopped.wait(PATIENCE_S)

    server.faults.append(hold)
    server.add_ollama("library/big", "latest", {"model": big_gguf})
    process = start(f"{server.host}/library/big")
    wait_for_bytes(server, process, 11)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    stopped.set()
    assert process.returncode == 130
    assert b"resumes it" in err
