"""Saved prompts and personas, as files of the configuration folder."""

import asyncio
import tomllib
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import Static

from gguf_io.system import can_name_file
from localllm.chats import saved
from localllm.chats.parameters import Parameters
from localllm.chats.saved import _as_toml, folder_of, read_persona, read_prompt, save_persona, save_prompt, saved_names
from localllm.errors import RequestError
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.systems import use_own_places
from tests.tui.chatting import ask, loaded, say, until
from tests.tui.conftest import MakeApp

DEFAULTS = Parameters()


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_own_places(tmp_path, monkeypatch)
    return tmp_path


def persona_file(name: str, text: str) -> Path:
    folder = folder_of("persona")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_persona_is_read_over_the_defaults_and_keeps_what_belongs_to_the_chat() -> None:
    persona_file(
        "clerk", 'system = """\nBe brief.\nBe kind."""\ntemperature = 0.2\nthink = false\nmodel = "qwen3:4b"\n'
    )
    found = read_persona("clerk")
    present = Parameters(top_k=5, folder="/notes", system="Old")
    assert found.model == "qwen3:4b"
    taken = found.over(present, DEFAULTS)
    assert taken == Parameters(system="Be brief.\nBe kind.", temperature=0.2, think=False, folder="/notes")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temperature = ", "is not valid TOML"),
        ("temprature = 0.2", "no parameter 'temprature'. Did you mean temperature?"),
        ("temperature = 200", "temperature must be between 0 and 100"),
        ("temperature = [1]", "temperature must be a text, a number"),
        ("model = 3", "model must be a name in quotes"),
    ],
)
def test_a_wrong_persona_is_refused_with_its_file(text: str, said: str) -> None:
    path = persona_file("clerk", text)
    with pytest.raises(RequestError) as refused:
        read_persona("clerk")
    assert str(path) in str(refused.value)
    assert said in str(refused.value)


def test_names_are_checked_and_nothing_is_written_over() -> None:
    assert read_prompt_after_saving("daily", "  What happened?\n") == "What happened?"
    with pytest.raises(RequestError, match=r"exists already\. Edit it"):
        save_prompt("daily", "Other")
    for name in ("../evil", ".hidden", "", "a b", "x" * 65):
        with pytest.raises(RequestError, match="is not a valid name"):
            save_prompt(name, "text")
    with pytest.raises(RequestError, match=r"no prompt weekly\. Saved: daily\."):
        read_prompt("weekly")
    with pytest.raises(RequestError, match=r"no persona clerk\. Saved: none yet"):
        read_persona("clerk")
    with pytest.raises(RequestError, match="Nothing differs"):
        save_persona("clerk", DEFAULTS, DEFAULTS, "tiny")
    assert saved_names("prompt") == ["daily"]


@pytest.mark.parametrize("name", ["con", "NUL", "aux.2024", "com1"])
def test_names_that_windows_reserves_are_refused_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "can_name_file", partial(can_name_file, on_windows=True))
    with pytest.raises(RequestError, match="Windows"):
        save_prompt(name, "text")
    with pytest.raises(RequestError, match="Windows"):
        read_persona(name)
    save_prompt(f"my-{name}", "text")


def read_prompt_after_saving(name: str, text: str) -> str:
    save_prompt(name, text)
    return read_prompt(name)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_system_prompt_can_be_written_as_toml(text: str) -> None:
    assert tomllib.loads(f"system = {_as_toml(text)}") == {"system": text}


def test_prompts_and_personas_in_the_chat(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()], [said("Two."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "/prompt")
            await until(pilot, lambda: chat.query(".note"))
            assert "There is no prompt yet" in str(chat.query_one(".note", Static).content)
            await ask(pilot, "What is new?")
            await say(pilot, "/prompt save news")
            await until(pilot, lambda: saved_names("prompt") == ["news"])
            await pilot.press(*"/prompt n", "tab")
            await until(pilot, lambda: chat.prompt.text == "/prompt news")
            await pilot.press("enter")
            await until(pilot, lambda: chat.prompt.text == "What is new?")
            chat.prompt.text = ""
            await say(pilot, "/set system Be brief.")
            await say(pilot, "/set temperature 0.25")
            await say(pilot, "/persona save clerk")
            await until(pilot, lambda: saved_names("persona") == ["clerk"])
            await say(pilot, "/set temperature 1")
            await until(pilot, lambda: chat.conversation.parameters.temperature == 1)
            await say(pilot, "/persona clerk")
            await until(pilot, lambda: chat.conversation.parameters.temperature == 0.25)
            await say(pilot, "/persona nobody")
            await until(pilot, lambda: chat.query(".failure"))

    asyncio.run(flow())
    assert tomllib.loads((folder_of("persona") / "clerk.toml").read_text("utf-8")) == {
        "system": "Be brief.",
        "temperature": 0.25,
    }


def test_a_chat_begins_as_a_persona(make_app: MakeApp) -> None:
    persona_file("clerk", 'system = "Be brief."\n')
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        app = make_app(backend)
        app.begin_with(False, None, read_persona("clerk"))
        async with app.run_test() as pilot:
            await loaded(pilot)
            await ask(pilot, "Hello")

    asyncio.run(flow())
    assert backend.requests[0].messages[0] == {"role": "system", "content": "Be brief."}
