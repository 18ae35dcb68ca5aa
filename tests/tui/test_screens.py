"""Pictures of the main screens at two sizes, compared with those in __snapshots__.

After a wanted change: `pytest tests/tui/test_screens.py --snapshot-update`, and look at the new pictures.
"""

import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from pytest_textual_snapshot import normalize_svg
from textual.pilot import Pilot
from textual.widgets import OptionList

from localllm.answer.event import AnswerEvent, AnswerPart, PartKind
from localllm.answer.tool_calls import ToolCall
from localllm.engine.inspection import EngineSnapshot, PrefixView, RequestView, StepRecord
from localllm.library.suggestions import ranked
from localllm.roofline.kept import KeptLimits
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import answered, ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp
from tui.backend import ModelChoice
from tui.choices import to_pull
from tui.screens.approval import ApprovalScreen
from tui.screens.inspector import InspectorScreen
from tui.screens.models import ModelsScreen
from tui.screens.parameters import ParametersScreen
from tui.screens.sessions import SessionsScreen

Compare = Callable[..., bool]
Flow = Callable[[Pilot[None]], Awaitable[None]]

PICTURES = Path(__file__).parent / "__snapshots__" / "test_screens"
STILL_SECONDS = 5.0

QUESTION = "Why do trees lose their leaves?"
ANSWER = """\
Trees lose their leaves to **save water**: in winter the ground is frozen, and wide leaves would lose what the \
roots cannot replace.

| tree   | leaves in winter |
|--------|------------------|
| beech  | no               |
| spruce | yes              |

```python
def is_bare(month: int) -> bool:
    return month in (12, 1, 2)
```
"""

OLD = "def is_bare(month: int) -> bool:\n    return month in (12, 1, 2)\n"
NEW = """\
    winter = (12, 1, 2) if north else (6, 7, 8)
    return month in winter
"""

SNAPSHOT = EngineSnapshot(
    steps=(*[StepRecord(512, 0, 0, 0.2)] * 3, StepRecord(31, 1, 0, 0.05), *[StepRecord(0, 1, 3, 0.02)] * 40),
    requests=(RequestView(140, 139, 16, 23, waiting=False, background=False),),
    prefixes=(PrefixView(0, 320, 2, 5, (PrefixView(320, 480, 1, 4), PrefixView(320, 400, 1, 5))),),
    page_size=16,
    pages_total=1000,
    page_holders=np.array([3] * 20 + [2] * 9 + [1] * 18, np.int32),
)


MEASURED = KeptLimits("a processor", "avx2", 2, "2026-11-23", read=20e9, int8=500e9, floats=100e9)


class Machine(FakeBackend):
    """Scripted answers, a built-in model, some to pull."""

    def __init__(self) -> None:
        super().__init__([said("Water, I think.", PartKind.REASONING), said(ANSWER), ended()])
        self.snapshot = SNAPSHOT
        self.painted = threading.Event()

    def memory_bytes(self) -> int | None:
        """It is asked for now and then, and pictures are taken in between."""
        return None

    def models(self, near: str | None) -> list[ModelChoice]:
        """They are listed once the chat behind the list is whole, so that the picture is always the same."""
        assert self.painted.wait(60)
        built_in = ModelChoice(
            "builtin", 6_000_000, "Q8_0", "5.6 M", 1024, 30_000_000, source="built-in", suits="small stories"
        )
        return [built_in, *(to_pull(suggestion, MEASURED) for suggestion in ranked(4 * 2**30))]


async def welcome(pilot: Pilot[None]) -> None:
    await loaded(pilot)


async def answer(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await ask(pilot, QUESTION)


async def thoughts(pilot: Pilot[None]) -> None:
    await answer(pilot)
    await pilot.press("ctrl+t", "ctrl+up")


async def commands(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await pilot.press("/")


async def wrong(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await say(pilot, "/set temprature 1")
    await until(pilot, lambda: chat_of(pilot).query(".failure"))


async def first_model(pilot: Pilot[None]) -> None:
    await until(pilot, lambda: [key for key in pilot.app.screen.query("FooterKey") if key.size.width])
    cast("Machine", chat_of(pilot).app.backend).painted.set()
    await until(pilot, lambda: isinstance(pilot.app.screen, ModelsScreen) and pilot.app.screen._all)
    entries = pilot.app.screen.query_one(OptionList)
    await until(pilot, lambda: fits(entries))


def fits(entries: OptionList) -> bool:
    """Whether the rows have the list's width: they are made before its first layout and again after it."""
    if not entries.option_count or entries.outer_size.width < 40:
        return False
    row = str(entries.get_option("builtin").prompt).splitlines()[0]
    return len(row) == entries.outer_size.width - 5 and entries.highlighted == 0


async def parameters(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await pilot.press("f5")
    await until(pilot, lambda: isinstance(pilot.app.screen, ParametersScreen))


async def chats(pilot: Pilot[None]) -> None:
    await answer(pilot)
    await pilot.press("f3")
    await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))


async def inspector(pilot: Pilot[None]) -> None:
    await answer(pilot)
    await pilot.press("f2")
    await until(pilot, lambda: isinstance(pilot.app.screen, InspectorScreen))
    picture = pilot.app.screen.query_one("#tree")
    await until(pilot, lambda: "share" in str(picture.render()))


async def approval(pilot: Pilot[None]) -> None:
    """The question whether a file may be changed."""
    chat = chat_of(pilot)
    folder = chat.tools.folder.root
    (folder / "leaves.py").write_text(OLD, encoding="utf-8")
    edit = {"path": "leaves.py", "old_text": "    return month in (12, 1, 2)\n", "new_text": NEW}
    calls = (ToolCall("edit_file", edit),)
    machine = cast("Machine", chat.app.backend)
    machine.scripts[0] = [AnswerEvent((AnswerPart(PartKind.TOOL_CALLS, "", calls),)), ended()]
    await loaded(pilot)
    await say(pilot, "/set tools on")
    await say(pilot, "Say it for the south too.")
    await until(pilot, lambda: isinstance(pilot.app.screen, ApprovalScreen) and pilot.app.screen.focused)
    chat.notice.display = False


async def tool_result(pilot: Pilot[None]) -> None:
    """The change and its result, after it was allowed."""
    await approval(pilot)
    cast("Machine", chat_of(pilot).app.backend).scripts.append([said("It asks for the hemisphere now."), ended()])
    await pilot.press("down", "enter")
    await until(pilot, lambda: len(chat_of(pilot).conversation.messages) == 4)
    await answered(pilot)


async def become(pilot: Pilot[None], stored: Path) -> None:
    """Wait until the screen is the stored picture: it is painted in several steps, and no event tells of the last one.

    One that never becomes it is left to the comparison, once it has stood still for some seconds.
    """
    wanted = normalize_svg(stored.read_text("utf-8")) if stored.exists() else ""
    last, since = "", time.monotonic()
    while time.monotonic() - since < STILL_SECONDS:
        picture = normalize_svg(pilot.app.export_screenshot(title=pilot.app.title, simplify=True))
        if picture == wanted:
            return
        if picture != last:
            last, since = picture, time.monotonic()
        await pilot.pause(0.05)


SIZES = {"80x24": (80, 24), "120x40": (120, 40)}
SMALL = {"60x20": (60, 20), **SIZES}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    ("flow", "model", "theme"),
    [
        pytest.param(welcome, "qwen3:0.6b", "localllm", id="welcome"),
        pytest.param(first_model, "", "localllm", id="first-model"),
        pytest.param(answer, "qwen3:0.6b", "localllm", id="answer"),
        pytest.param(answer, "qwen3:0.6b", "localllm-light", id="answer-light"),
        pytest.param(answer, "qwen3:0.6b", "no colour", id="answer-without-colour"),
        pytest.param(thoughts, "qwen3:0.6b", "localllm", id="thoughts"),
        pytest.param(commands, "qwen3:0.6b", "localllm", id="commands"),
        pytest.param(wrong, "qwen3:0.6b", "localllm-light", id="error"),
        pytest.param(parameters, "qwen3:0.6b", "localllm", id="parameters"),
        pytest.param(chats, "qwen3:0.6b", "localllm", id="chats"),
        pytest.param(inspector, "qwen3:0.6b", "localllm", id="inspector"),
    ],
)
def test_a_screen(
    flow: Flow,
    model: str,
    theme: str,
    size: tuple[int, int],
    make_app: MakeApp,
    snap_compare: Compare,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if theme == "no colour":
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("tui.screens.models.available_memory", lambda: 4 * 2**30)
    monkeypatch.setattr("tui.screens.sessions._age", lambda _seconds: "just now")
    app = make_app(Machine(), model, plain_colours=theme == "no colour")
    if theme != "no colour":
        app.theme = theme

    async def flow_and_picture(pilot: Pilot[None]) -> None:
        await flow(pilot)
        await become(pilot, PICTURES / f"{request.node.name}.svg")

    assert snap_compare(app, terminal_size=size, run_before=flow_and_picture)


@pytest.mark.parametrize("size", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize(
    ("flow", "theme"),
    [
        pytest.param(approval, "localllm", id="approval"),
        pytest.param(approval, "localllm-light", id="approval-light"),
        pytest.param(tool_result, "localllm", id="tool-result"),
    ],
)
def test_a_screen_of_tools(
    flow: Flow,
    theme: str,
    size: tuple[int, int],
    make_app: MakeApp,
    snap_compare: Compare,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder = tmp_path / "project"
    folder.mkdir()
    machine = Machine()
    machine.converses = True
    app = make_app(machine, "qwen3:0.6b", folder=folder)
    app.theme = theme

    async def flow_and_picture(pilot: Pilot[None]) -> None:
        await flow(pilot)
        await become(pilot, PICTURES / f"{request.node.name}.svg")

    assert snap_compare(app, terminal_size=size, run_before=flow_and_picture)
