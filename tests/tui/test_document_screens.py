"""Pictures of a chat about a folder, and of one with a summary, in the sizes and colours of test_screens."""

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp
from tests.tui.test_screens import become

PICTURES = Path(__file__).parent / "__snapshots__" / "test_document_screens"
NOTES = "# Ships\n\nThe harbour was built in 1924.\nIt has three piers, and\na small crane.\n"
ANSWER = """\
The harbour is about a hundred years old:

- "The harbour was built in 1924."
- It has "three piers, and a small crane", and "a red lighthouse".
"""
SIZES = {"60x20": (60, 20), "80x24": (80, 24), "120x40": (120, 40)}


class Machine(FakeBackend):
    """Nothing that changes by itself."""

    def memory_bytes(self) -> int | None:
        return None


async def folder(pilot: Pilot[None], root: Path) -> None:
    documents = root / "documents"
    documents.mkdir()
    (documents / "notes.md").write_text(NOTES)
    (documents / "tides.py").write_text("def harbour(hour):\n    return hour % 12 == 3\n")
    chat = await loaded(pilot)
    await say(pilot, f"/folder {documents}")
    await until(pilot, lambda: chat.conversation.parameters.folder)
    await ask(pilot, "How old is the harbour, and what does it have?")
    await until(pilot, lambda: chat.title_bar.title == "Harbour")


async def summary(pilot: Pilot[None], _root: Path) -> None:
    chat = await loaded(pilot)
    for number in range(3):
        await ask(pilot, f"Question {number}?")
        await until(pilot, lambda: chat.title_bar.title == "Harbour")
    await say(pilot, "/compact")
    await until(pilot, lambda: chat.conversation.summed() and not chat.busy)
    chat.notice.display = False
    chat.transcript.views[1]._summary.collapsed = False  # type: ignore[attr-defined]
    await pilot.press("pageup", "pageup", "pageup")


FLOWS: dict[str, Any] = {"folder": folder, "summary": summary}


@pytest.mark.parametrize(
    ("flow", "theme", "size"),
    [
        ("folder", "localllm", "60x20"),
        ("folder", "localllm-light", "80x24"),
        ("folder", "no colour", "120x40"),
        ("summary", "localllm", "80x24"),
    ],
)
def test_a_screen_of_documents(
    flow: str,
    theme: str,
    size: str,
    make_app: MakeApp,
    snap_compare: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for variable in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    if theme == "no colour":
        monkeypatch.setenv("NO_COLOR", "1")
    title = [said("Harbour"), ended()]
    answers = [said(ANSWER), ended()] if flow == "folder" else [said("It is so."), ended()]
    notes = [said("The user asks about the harbour, built in 1924."), ended()]
    app = make_app(Machine(answers, title, answers, answers, notes, converses=True), plain_colours=theme == "no colour")
    if theme != "no colour":
        app.theme = theme

    async def flow_and_picture(pilot: Pilot[None]) -> None:
        await FLOWS[flow](pilot, tmp_path)
        chat_of(pilot).notice.display = False
        await become(pilot, PICTURES / f"{request.node.name}.svg")

    assert snap_compare(app, terminal_size=SIZES[size], run_before=flow_and_picture)
