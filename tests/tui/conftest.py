"""Fixtures of the chat's tests: a store in a temporary folder, and no animations."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Textual reads this when it is imported.
os.environ["TEXTUAL_ANIMATIONS"] = "none"

import pytest
from textual.widgets import Input, TextArea

from localllm.chats import SessionStore
from tests.fakes.fake_backend import FakeBackend
from tui.app import ChatApp
from tui.terminal import Abilities
from tui.widgets import pictures

MakeApp = Callable[..., ChatApp]
DrawAs = Callable[[Abilities], None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    opened = SessionStore(tmp_path / "sessions.db")
    yield opened
    opened.close()


@pytest.fixture
def make_app(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> MakeApp:
    """Builds an app on a backend; its model is "tiny" unless the test says otherwise."""
    for field in (Input, TextArea):
        monkeypatch.setattr(field, "cursor_blink", False)

    def make(backend: FakeBackend, model: str = "tiny", **options: object) -> ChatApp:
        return ChatApp(backend, store, model, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def draw_as(monkeypatch: pytest.MonkeyPatch) -> DrawAs:
    """Draws pictures as in a terminal with these abilities, which has 80 columns and 24 lines."""
    monkeypatch.setattr(pictures, "_drawing", None)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((80, 24)))
    return pictures.use_pictures
