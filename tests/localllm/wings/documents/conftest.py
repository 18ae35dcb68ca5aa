"""Shared fixtures: a folder of documents, and localllm's own folders beside it."""

from pathlib import Path

import pytest

from tests.systems import use_own_places

NOTES = """\
# Ships

The harbour was built in 1924.
It has three piers, and
a small crane.

# Opening hours

The museum is closed on Mondays.
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Documents, in their own home."""
    use_own_places(tmp_path / "home", monkeypatch)
    found = tmp_path / "documents"
    (found / "code").mkdir(parents=True)
    (found / "notes.md").write_text(NOTES)
    (found / "code" / "tides.py").write_text("def high_water(hour):\n    return hour % 12 == 3\n")
    return found
