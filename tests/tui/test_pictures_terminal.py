"""Terminals that may or may not draw pictures."""

import os
import sys
from types import SimpleNamespace

import pytest

from tests.gpu_offload.projector_files import png
from tui.terminal import Abilities, ask_terminal
from tui.widgets import pictures


@pytest.mark.parametrize("size", [(0, 0), (80, 0), (0, 24)])
def test_a_terminal_without_a_size_is_not_asked_for_pictures(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As expect, `docker exec -t` and CI give it."""
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size(size))
    monkeypatch.delitem(sys.modules, "textual_image.renderable", raising=False)
    monkeypatch.setattr(pictures, "_drawing", None)
    pictures.use_pictures()
    assert pictures._drawing is None and "textual_image.renderable" not in sys.modules


def test_a_terminal_without_graphics_draws_half_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    widgets = pytest.importorskip("textual_image.widget")
    monkeypatch.setattr(pictures, "_has_size", lambda: True)
    monkeypatch.setattr(pictures, "_drawing", None)
    pictures.use_pictures()
    assert isinstance(pictures.drawn(png(1)), widgets.HalfcellImage)


@pytest.mark.parametrize(
    ("answer", "able"),
    [
        (b"\x1b[?62;22c", Abilities()),
        (b"\x1b[?62;4;22c", Abilities(draws=True)),
        (b"\x1b[?64c", Abilities()),  # 64 is no 4
        (b"\x1b]11;rgb:ffff/ffff/eeee\x1b\\\x1b_Gi=31;OK\x1b\\\x1b[?62c", Abilities(light=True, draws=True)),
        (b"hi\x1b]11;rgb:0000/0000/0000\x07\x1b_Gi=31;ENOENT:no\x1b\\\x1b[?62c", Abilities(typed="hi")),
        (b"\x1b_Gi=31;OK\x1b\\hey\x1b[?1;2c", Abilities(draws=True, typed="hey")),
    ],
)
def test_one_question_tells_what_a_terminal_can_do(
    answer: bytes, able: Abilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    pty = pytest.importorskip("pty", reason="Windows has no such module")
    monkeypatch.delenv("COLORFGBG", raising=False)
    outside, inside = pty.openpty()
    asked = os.pipe()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: inside))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: asked[1]))
    try:
        os.write(outside, answer)
        assert ask_terminal() == able
        assert os.read(asked[0], 100).endswith(b"\x1b[c")
    finally:
        for opened in (outside, inside, *asked):
            os.close(opened)
