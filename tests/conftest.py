"""Fixtures that every package's tests share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real tiny models, vocabularies, templates and texts (LOCALLLM_TEST_DATA); skips where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("LOCALLLM_TEST_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; set LOCALLLM_TEST_DATA")
    return path
