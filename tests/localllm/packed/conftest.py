"""Each test has a home of its own, in which packed weights are kept at once."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm import packed
from tests.localllm.packed.packed_loads import Loads, pack_at_once
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pack_at_once(tmp_path / "home", monkeypatch)
    return tmp_path


@pytest.fixture
def model(home: Path) -> Path:
    return write(MODELS["llama"], home / "model.gguf")


@pytest.fixture
def load() -> Iterator[Loads]:
    yield Loads()
    if sys.platform != "win32":  # which lets nobody remove what a program has mapped
        assert not any(path.name.startswith(".localllm-") for path in packed.packed_folder().glob("*"))
