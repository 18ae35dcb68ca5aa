"""The content of localllm's own store."""

import hashlib
from pathlib import Path

from localllm.library.lookup import users_models
from localllm.settings import Settings

SETTINGS = Settings()


def stored(home: Path) -> dict[str, bytes]:
    """Everything in the store except locks: what a pull leaves."""
    store = home / "localllm/models"
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in store.rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    }


def no_model_and_no_half_file(home: Path) -> None:
    assert list(users_models(SETTINGS)) == []
    for name, data in stored(home).items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256-{hashlib.sha256(data).hexdigest()}"
        else:
            assert name.startswith("partial/")
