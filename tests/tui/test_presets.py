"""Presets in the settings: chosen, saved, renamed and deleted."""

import asyncio
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static, TextArea

from localllm.chats.saved import folder_of, read_persona, saved_names
from tests.fakes.fake_backend import FakeBackend
from tests.systems import use_own_places
from tests.tui.chatting import chat_of, loaded, until
from tests.tui.conftest import MakeApp
from tui.screens.parameters import ParametersScreen


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_places(tmp_path, monkeypatch)


async def opened(pilot: Pilot[None]) -> ParametersScreen:
    await pilot.press("f5")
    await until(pilot, lambda: isinstance(pilot.app.screen, ParametersScreen))
    panel = pilot.app.screen
    assert isinstance(panel, ParametersScreen)
    return panel


def told(panel: ParametersScreen) -> str:
    return str(panel.query_one(".error", Static).content)


def rows(panel: ParametersScreen) -> list[str]:
    entries = panel.query_one("#presets", OptionList)
    return [str(entries.get_option_at_index(place).prompt) for place in range(entries.option_count)]


def test_a_preset_is_saved_renamed_used_and_deleted(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            panel = await opened(pilot)
            assert [row.split()[0] for row in rows(panel)] == ["balanced", "precise", "creative", "greedy"]
            await pilot.press("ctrl+n", *"judge", "enter")
            await until(pilot, lambda: "Nothing differs" in told(panel))
            await pilot.press("escape")
            panel.query_one(TextArea).text = "Answer yes\nor no."
            panel.query_one("#temperature", Input).value = "0.1"
            await pilot.press("ctrl+n", *"judge", "enter")
            await until(pilot, lambda: saved_names("persona") == ["judge"])
            assert rows(panel)[4].split(maxsplit=1) == ["judge", "system Answer yes or no., temperature 0.1"]
            await pilot.press("ctrl+e")
            await pilot.press(*["backspace"] * 5, *"oracle", "enter")
            await until(pilot, lambda: saved_names("persona") == ["oracle"])
            await pilot.press("escape", "escape")
            await until(pilot, lambda: pilot.app.screen is chat)
            assert chat.conversation.parameters.system == "", "saving a preset changes no chat"

            panel = await opened(pilot)
            await pilot.press("end", "enter", "ctrl+s")
            await until(pilot, lambda: pilot.app.screen is chat_of(pilot))
            now = chat.conversation.parameters
            assert (now.system, now.temperature) == ("Answer yes\nor no.", 0.1)

            panel = await opened(pilot)
            await pilot.press("ctrl+d")  # a preset of ours
            await pilot.press("end", "ctrl+d")
            await until(pilot, lambda: told(panel) == "Ctrl+D again deletes oracle for good.")
            await pilot.press("up", "end", "ctrl+d")
            assert saved_names("persona") == ["oracle"]
            await pilot.press("ctrl+d")
            await until(pilot, lambda: len(rows(panel)) == 4)
            assert not saved_names("persona")

    asyncio.run(flow())


def test_names_that_exist_and_presets_that_cannot_be_read(make_app: MakeApp) -> None:
    folder = folder_of("persona")
    folder.mkdir(parents=True)
    (folder / "bad.toml").write_text("temperature = 900", encoding="utf-8")
    (folder / "good.toml").write_text('model = "qwen3:4b"\nseed = 7', encoding="utf-8")

    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            await loaded(pilot)
            panel = await opened(pilot)
            assert "temperature must be between" in rows(panel)[4]
            await pilot.press("end", "up", "enter")
            await until(pilot, lambda: "temperature must be between" in told(panel))
            await pilot.press("down", "enter")
            await until(pilot, lambda: told(panel).endswith("/persona good also loads qwen3:4b."))
            assert panel.query_one("#seed", Input).value == "7"
            for keys in (["ctrl+e", *["backspace"] * 4, *"bad"], ["ctrl+n", *"bad"]):
                await pilot.press(*keys, "enter")
                await until(pilot, lambda: "exists already" in told(panel))
                await pilot.press("escape", "end")

    asyncio.run(flow())
    assert read_persona("good").values == {"seed": "7"}
    assert saved_names("persona") == ["bad", "good"]
