"""Terminals that may or may not draw pictures."""

import os
import sys

import pytest

from tui.widgets import pictures


@pytest.mark.parametrize("size", [(0, 0), (80, 0), (0, 24)])
def test_a_terminal_without_a_size_is_not_asked_for_pictures(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As expect, `docker exec -t` and CI give it."""
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size(size))
    monkeypatch.delitem(sys.modules, "textual_image.renderable", raising=False)
    monkeypatch.setattr(pictures, "_drawing", None)
    pictures.ask_terminal()
    assert pictures._drawing is None and "textual_image.renderable" not in sys.modules
