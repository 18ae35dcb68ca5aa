"""Pictures of every screen in some sizes and colours, compared with those in __snapshots__.

After an intended change: `pytest tests/tui/test_screens.py --snapshot-update`, and review the new pictures. All sizes
and colours: `python -m tests.tui.screens FOLDER`.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pytest_textual_snapshot import normalize_svg
from textual.pilot import Pilot

from tests.tui.screens import SCREENS, SIZES, app_at

Compare = Callable[..., bool]

PICTURES = Path(__file__).parent / "__snapshots__" / "test_screens"
STILL_SECONDS = 5.0

# Their notes contain paths of this run's temporary folder.
WITH_PATHS = {"tools", "personas"}
DRAWN = (
    *("welcome-dark-80x24", "loading-dark-60x20", "first-model-dark-80x24", "answer-dark-80x24"),
    *("answer-light-120x40", "answer-no colour-80x24", "answer-16 colours-200x50", "wide-dark-60x20"),
    *(
        "thoughts-16 colours-60x20",
        "writing-dark-80x24",
        "question-dark-60x20",
        "editing-light-60x20",
        "commands-light-80x24",
    ),
    *("palette-dark-80x24", "help-note-dark-60x20", "wrong-light-60x20", "models-dark-60x20"),
    *("parameters-dark-60x20", "chats-dark-60x20", "chats-found-light-80x24", "find-dark-80x24"),
    *("tabs-dark-60x20", "leaving-dark-80x24", "picker-dark-60x20", "inspector-dark-120x40", "timeline-light-80x24"),
    *("laboratory-16 colours-120x40", "answers-dark-80x24", "approval-dark-60x20", "approval-to-run-light-80x24"),
    *("tool-result-dark-80x24", "folder-light-80x24", "summary-dark-80x24"),
)


async def become(pilot: Pilot[None], stored: Path) -> None:
    """Wait until the screen equals the stored picture: it is painted in several steps, without an event after the last.

    A screen that never does is compared once it has not changed for some seconds.
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


@pytest.mark.parametrize("picture", DRAWN)
def test_a_screen(picture: str, snap_compare: Compare, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    screen, colours, size = picture.rsplit("-", 2)

    async def flow_and_picture(pilot: Pilot[None]) -> None:
        await SCREENS[screen](pilot)
        await become(pilot, PICTURES / f"{request.node.name}.svg")

    with app_at(screen, colours, tmp_path) as app:
        assert snap_compare(app, terminal_size=SIZES[size], run_before=flow_and_picture)


def test_every_screen_is_drawn() -> None:
    assert {picture.rsplit("-", 2)[0] for picture in DRAWN} == SCREENS.keys() - WITH_PATHS
