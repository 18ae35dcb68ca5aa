"""create, cp, rm and quantize, killed before each of their disk operations: a model is complete or absent."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_io import open_model
from localllm.files import STALE_S
from localllm.library.lookup import find, users_models
from localllm.library.manifest import Manifest, blob_files
from localllm.library.names import ModelName
from localllm.library.own_store import OwnStore
from localllm.library.places import own_store
from localllm.settings import Settings
from tests.forking import Nursery
from tests.gguf_files import finish
from tests.localllm.library.conftest import write_file
from tests.systems import KILL, KILLED

pytestmark = pytest.mark.slow

SETTINGS = Settings()

# Kills itself before the n-th operation that changes something below the home folder.
SCRIPT = (
    f"KILL = {KILL:d}"
    + """
import os, sys
home, left = os.environ["HOME"], int(sys.argv[1])
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def count(event, arguments):
    global left
    changes = event in {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"}
    changes = changes or (event == "open" and arguments[2] & WRITING)
    if changes and any(str(argument).startswith(home) for argument in arguments):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), KILL)

sys.addaudithook(count)
from localllm.cli.main import main
sys.argv[1:] = sys.argv[2:]
main()
"""
)


def killed_everywhere(children: Nursery, command: str, check: Callable[[], None]) -> int:
    """Run a command, killed before its first operation, then before its second, until it completes;
    return the count.
    """
    for step in range(1, 1000):
        process = children.start(SCRIPT, [str(step), *command.split()])
        _, err = process.communicate()
        assert process.returncode in (0, KILLED), err.decode()
        check()
        if process.returncode == 0:
            return step
    raise AssertionError("the command does not end")


def names() -> set[str]:
    """The models of the store, each of which must be complete; nothing else may look like one."""
    store = OwnStore(own_store(SETTINGS))
    found = [model for model in users_models(SETTINGS) if model.manifest is not None]
    for model in found:
        assert model.manifest is not None
        assert all((store.blobs / file).is_file() for file in blob_files(model.manifest.layers))
        with open_model(model.path):
            model.defaults()
    return {model.name for model in found}


def tidy() -> None:
    """The clean-up command frees what was left behind."""
    store = OwnStore(own_store(SETTINGS))
    store.remove_unfinished()
    used = {file for model in users_models(SETTINGS) if model.manifest for file in blob_files(model.manifest.layers)}
    assert {path.name for path in store.blobs.iterdir() if not path.name.startswith(".")} == used


def test_create(home: Path, tiny_gguf: bytes, children: Nursery) -> None:
    write_file(home / "tiny.gguf", tiny_gguf)
    write_file(home / "Modelfile", b"FROM ./tiny.gguf\nSYSTEM Be brief.\nPARAMETER top_k 3\nLICENSE MIT")

    def check() -> None:
        assert names() <= {"mine:latest"}

    assert killed_everywhere(children, "create mine", check) > 10
    assert find("mine", SETTINGS).defaults().system == "Be brief."
    tidy()


def test_cp_and_rm(home: Path, tiny_gguf: bytes, children: Nursery) -> None:
    store = OwnStore(own_store(SETTINGS))
    store.prepare()
    layers = store.add_blob("model", tiny_gguf), store.add_blob("system", b"Be brief.")
    store.add_manifest(ModelName("other"), Manifest(layers))

    def check_copy() -> None:
        assert {"other:latest"} <= names() <= {"other:latest", "second:latest"}

    assert killed_everywhere(children, "cp other second", check_copy) > 3
    store.remove(ModelName("second"))

    def check_removal() -> None:
        assert names() <= {"other:latest"}
        if not names():  # it was removed before the kill: start again
            again = store.add_blob("model", tiny_gguf), store.add_blob("system", b"Be brief.")
            store.add_manifest(ModelName("other"), Manifest(again))

    assert killed_everywhere(children, "rm other", check_removal) > 3
    tidy()


def test_quantize(home: Path, children: Nursery) -> None:
    writer = gguf.GGUFWriter(home / "model.gguf", "llama")
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.ones((64, 64), np.float32))
    finish(writer)

    def check() -> None:
        if (home / "small.gguf").exists():
            with open_model(home / "small.gguf") as made:
                assert {tensor.type.name for tensor in made.tensors.values()} == {"Q8_0"}
            (home / "small.gguf").unlink()  # an existing file is never overwritten

    assert killed_everywhere(children, "quantize model.gguf small.gguf --type Q8_0", check) > 2
    old = time.time() - 2 * STALE_S
    left = [*home.glob(".localllm-small.gguf.*.tmp")]
    for path in left:
        os.utime(path, (old, old))
    process = children.start(SCRIPT, ["0", "quantize", "model.gguf", "small.gguf", "--type", "Q8_0"])
    process.communicate()
    assert left and process.returncode == 0
    assert not [*home.glob(".localllm-small.gguf.*.tmp")]
