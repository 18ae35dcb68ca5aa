"""The prompt in the user's own editor."""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.fakes.fake_backend import FakeBackend
from tests.systems import make_program
from tests.tui.chatting import chat_of, loaded, until
from tests.tui.conftest import MakeApp
from tui.app import ChatApp
from tui.editor import editor_command


@pytest.fixture
def suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An application without a terminal cannot give it away; the editors here need none."""

    @contextlib.contextmanager
    def suspend(_: ChatApp) -> Iterator[None]:
        yield

    monkeypatch.setattr(ChatApp, "suspend", suspend)


APPENDS = """
import sys
assert sys.argv[1] == "--wait"
with open(sys.argv[2], "a", encoding="utf-8") as file:
    file.write(" and\\nmore\\n")
"""


def editor(folder: Path, code: str) -> str:
    """The command of a program that does this with the file it is given."""
    return f'"{make_program(folder / "my editor", code)}" --wait'


async def edit(pilot: Pilot[None], draft: str) -> None:
    chat = await loaded(pilot)
    chat.prompt.insert(draft)
    await pilot.press("ctrl+x", "ctrl+e")


@pytest.mark.usefixtures("suspended")
def test_what_is_saved_becomes_the_prompt(make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", editor(tmp_path, APPENDS))

    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            await edit(pilot, "a draft")
            await until(pilot, lambda: chat_of(pilot).prompt.text == "a draft and\nmore")
            await pilot.press("ctrl+e")  # without Ctrl+X, it is TextArea's own key
            assert chat_of(pilot).prompt.text == "a draft and\nmore"

    asyncio.run(flow())


@pytest.mark.usefixtures("suspended")
@pytest.mark.parametrize(
    ("script", "said"),
    [("import sys; sys.exit(3)", "exit status 3"), (None, "cannot be started"), ("'", "is no command")],
)
def test_an_editor_that_fails_leaves_the_draft(
    make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    command = "'" if script == "'" else editor(tmp_path, script) if script else str(tmp_path / "nothing")
    monkeypatch.setenv("VISUAL", command)

    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            await edit(pilot, "a draft")
            chat = chat_of(pilot)
            await until(pilot, lambda: chat.transcript.query(".failure"))
            assert said in str(chat.transcript.query(".failure").first().render())
            assert chat.prompt.text == "a draft"

    asyncio.run(flow())


def test_a_windows_path_in_quotes_is_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(shutil, "which", lambda _name: None)  # newer versions call Windows there
    monkeypatch.setenv("VISUAL", r'"C:\Program Files\x\code.cmd" --wait')
    assert editor_command() == [r"C:\Program Files\x\code.cmd", "--wait"]


def test_an_editor_is_found_on_the_path_whatever_its_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows starts code.cmd by its whole name only."""
    name = "code.cmd" if sys.platform == "win32" else "code"
    (tmp_path / name).write_text("")
    (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VISUAL", "code --wait")
    found, *rest = editor_command()
    assert Path(found).samefile(tmp_path / name) and rest == ["--wait"]
