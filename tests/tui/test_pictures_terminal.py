"""Terminals that may or may not draw pictures."""

import asyncio
import base64
import io
import os
import re
import sys
from types import SimpleNamespace

import pytest
from PIL import Image
from textual.app import App
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from tests.picture_files import png
from tests.tui.chatting import until
from tests.tui.conftest import DrawAs
from tui.terminal import Abilities, ask_terminal
from tui.widgets.pictures import DrawnPicture, HalfBlocks, decoded


def drawing() -> type[Widget]:
    """The widget that draws a picture."""

    async def flow() -> type[Widget]:
        app = App[None]()
        async with app.run_test() as pilot:
            picture = DrawnPicture(png(1))
            await app.mount(picture)
            await until(pilot, lambda: picture.children)
            return type(picture.children[0])

    return asyncio.run(flow())


@pytest.mark.parametrize("size", [(0, 0), (80, 0), (0, 24)])
def test_a_terminal_without_a_size_is_not_asked_for_pictures(
    size: tuple[int, int], draw_as: DrawAs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As expect, `docker exec -t` and CI give it."""
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size(size))
    monkeypatch.delitem(sys.modules, "textual_image.renderable", raising=False)
    draw_as(Abilities(draws=True))
    assert drawing() is HalfBlocks and "textual_image.renderable" not in sys.modules


@pytest.mark.parametrize("abilities", [Abilities(), Abilities(draws=True), Abilities(light=True, typed="a")])
def test_a_terminal_without_graphics_draws_half_blocks(abilities: Abilities, draw_as: DrawAs) -> None:
    """Also where textual-image finds that the terminal cannot what it claims."""
    draw_as(abilities)
    assert drawing() is HalfBlocks


def test_iterm_and_wezterm_draw_by_iterms_protocol(draw_as: DrawAs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture is a PNG file with the pixels, in as many cells as they take."""
    pytest.importorskip("textual_image.widget")
    from tui.widgets.inline_images import InlineImage, _Inline

    monkeypatch.setattr("tui.widgets.inline_images.get_cell_size", lambda: SimpleNamespace(width=10, height=20))
    draw_as(Abilities(draws=True, inline=True))
    assert drawing() is InlineImage
    picture = Image.new("RGB", (95, 61), "teal")
    written = _Inline(picture)._image_to_sixels(picture)
    found = re.fullmatch(r"\x1b\]1337;File=inline=1;size=(\d+);width=10;height=4;doNotMoveCursor=1:(.*)\x07", written)
    assert found is not None
    data = base64.b64decode(found[2], validate=True)
    assert len(data) == int(found[1]) and Image.open(io.BytesIO(data)).tobytes() == picture.tobytes()


def test_half_blocks_show_two_pixels_in_a_cell_and_keep_the_shape() -> None:
    picture = Image.new("RGB", (4, 4), "red")
    picture.paste("blue", (0, 2, 4, 4))

    async def flow() -> None:
        app = App[None]()
        async with app.run_test(size=(80, 60)) as pilot:
            drawn = HalfBlocks(picture, "picture")
            await app.mount(drawn)
            assert drawn.get_content_width(Size(80, 24), Size(80, 24)) == 48

            async def shown(width: int, height: int) -> list[Strip]:
                drawn.styles.width, drawn.styles.height = width, height
                await until(pilot, lambda: drawn.size == (width, height))
                lines = [drawn.render_line(y) for y in range(height)]
                return [line for line in lines if "▀" in line.text]

            for line, colour in zip(await shown(4, 2), ("#ff0000", "#0000ff"), strict=True):
                (style,) = {segment.style for segment in line}
                assert style is not None and style.color is not None and style.bgcolor is not None
                assert line.text == "▀" * 4 and style.color.name == style.bgcolor.name == colour
            assert [len(await shown(*size)) for size in ((40, 5), (4, 50), (1, 1))] == [5, 2, 1]

    asyncio.run(flow())


def test_damaged_pictures_are_not_drawn() -> None:
    assert decoded(png(1)[:40]) is None and decoded(b"") is None
    assert decoded(png(1)) is decoded(png(1))  # a preview is not decoded again for its message


@pytest.mark.parametrize(
    ("answer", "able"),
    [
        (b"\x1b[?62;22c", Abilities()),
        (b"\x1b[?62;4;22c", Abilities(draws=True)),
        (b"\x1b[?64c", Abilities()),  # 64 is no 4
        (b"\x1b]11;rgb:ffff/ffff/eeee\x1b\\\x1b_Gi=31;OK\x1b\\\x1b[?62c", Abilities(light=True, draws=True)),
        (b"hi\x1b]11;rgb:0000/0000/0000\x07\x1b_Gi=31;ENOENT:no\x1b\\\x1b[?62c", Abilities(typed="hi")),
        (b"\x1b_Gi=31;OK\x1b\\hey\x1b[?1;2c", Abilities(draws=True, typed="hey")),
        (b"\x1bP>|iTerm2 3.5.10\x1b\\\x1b[?62;4c", Abilities(draws=True, inline=True)),
        (b"\x1b]11;rgb:0/0/0\x07\x1bP>|WezTerm 20240203\x1b\\yo\x1b[?65c", Abilities(False, True, "yo", True)),
        (b"\x1bP>|tmux 3.5a\x1b\\\x1b[?1;2;4c", Abilities(draws=True)),
    ],
)
def test_one_question_tells_what_a_terminal_can_do(
    answer: bytes, able: Abilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    pty = pytest.importorskip("pty", reason="Windows has no such module")
    for name in ("COLORFGBG", "TERM_PROGRAM", "TMUX"):
        monkeypatch.delenv(name, raising=False)
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


@pytest.mark.parametrize(
    ("program", "answer", "tmux", "inline"),
    [
        ("iTerm.app", b"", False, True),
        ("WezTerm", b"", False, True),
        ("iTerm.app", b"", True, False),  # an older tmux passes the name on
        ("iTerm.app", b"\x1bP>|tmux 3.3a\x1b\\", False, False),
        ("Apple_Terminal", b"", False, False),
    ],
)
def test_the_terminals_name_comes_from_its_reply_or_a_variable(
    program: str, answer: bytes, tmux: bool, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pty = pytest.importorskip("pty", reason="Windows has no such module")
    monkeypatch.setenv("TERM_PROGRAM", program)
    monkeypatch.delenv("TMUX", raising=False)
    if tmux:
        monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    outside, inside = pty.openpty()
    asked = os.pipe()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: inside))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: asked[1]))
    try:
        os.write(outside, answer + b"\x1b[?62c")
        assert ask_terminal().inline is inline
    finally:
        for opened in (outside, inside, *asked):
            os.close(opened)
