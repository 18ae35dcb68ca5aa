"""Loading in the background: the first model, pulls, Esc, and what stays if a model cannot be loaded."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList, Static

from localllm.chats import SessionStore
from localllm.engine.request import FinishReason
from localllm.files import with_slashes
from localllm.front.models import find_or_pull
from localllm.library.lookup import users_models
from localllm.settings import Settings
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.localllm.library.conftest import write_ollama_model
from tests.localllm.library.model_server import ModelServer
from tests.systems import use_own_places
from tests.tui.chatting import answered, ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp
from tui.backend import LoadStoppedError, PickerRow, short_name
from tui.choices import model_choices
from tui.commands.sessions import open_session
from tui.screens.models import PickerScreen
from tui.screens.question import QuestionScreen
from tui.screens.sessions import SessionsScreen
from tui.widgets.frame import KeyBar

BUILT_IN = PickerRow("builtin", 6_000_000, "Q8_0", "5.6 M", 1024, 30_000_000, source="built-in")
TO_PULL = PickerRow("small:1b", 10**9, memory=10**9, here=False, suits="short answers", licence="MIT")


class NewBackend(FakeBackend):
    """A machine on which the user has no model."""

    def models(self, near: str | None) -> Sequence[PickerRow]:
        return (BUILT_IN, TO_PULL)


async def offered(pilot: Pilot[None]) -> PickerScreen:
    await until(pilot, lambda: isinstance(pilot.app.screen, PickerScreen) and pilot.app.screen.choices)
    screen = pilot.app.screen
    assert isinstance(screen, PickerScreen)
    return screen


def note_of(pilot: Pilot[None]) -> str:
    return str(chat_of(pilot).query_one(".failure", Static).content)


def test_somebody_without_a_model_chooses_one(make_app: MakeApp, store: SessionStore) -> None:
    backend = NewBackend()

    async def flow() -> None:
        async with make_app(backend, "").run_test() as pilot:
            screen = await offered(pilot)
            rows = [str(screen.query_one(OptionList).get_option(name).prompt) for name in ("builtin", "small:1b")]
            assert "needs 28.6 MiB" in rows[0]
            assert "short answers" in rows[1]
            assert "MIT" in rows[1]
            await pilot.press("down", "enter")
            await loaded(pilot)

    asyncio.run(flow())
    assert backend.loaded == ["small:1b"]
    assert store.remembered("model") == "small:1b"


def test_who_chooses_nothing_gets_the_built_in_one(make_app: MakeApp) -> None:
    backend = NewBackend()

    async def flow() -> None:
        async with make_app(backend, "").run_test() as pilot:
            await offered(pilot)
            await pilot.press("escape")
            await loaded(pilot)

    asyncio.run(flow())
    assert backend.loaded == ["builtin"]


def test_without_a_network_the_built_in_model_answers_with_a_notice(make_app: MakeApp) -> None:
    backend = NewBackend([said("One."), ended()])
    backend.unavailable = {"small:1b"}

    async def flow() -> None:
        async with make_app(backend, "").run_test() as pilot:
            await offered(pilot)
            await pilot.press("down", "enter")
            await loaded(pilot)
            assert note_of(pilot).startswith("small:1b cannot be had. The built-in model answers instead")
            assert (await ask(pilot, "Hi")).content == "One."

    asyncio.run(flow())
    assert backend.loaded == ["builtin"]


def test_escape_stops_a_load_and_the_model_before_it_stays(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            backend.gate.clear()
            await say(pilot, "/load other")
            await until(pilot, lambda: chat.status_line.facts.activity == ("loading weights", 0.5))
            assert chat.info is None
            await pilot.press("escape")
            assert chat.info
            assert chat.info.name == chat.status_line.facts.model == chat.title_bar.model == "tiny"
            assert chat.status_line.facts.activity is None
            assert (await ask(pilot, "Hi")).content == "One."
            backend.gate.set()

    asyncio.run(flow())
    assert backend.loaded == ["tiny"]
    assert store.remembered("model") == "tiny"


def test_leaving_while_a_model_loads_is_not_an_error(make_app: MakeApp) -> None:
    backend = FakeBackend()
    backend.gate.clear()

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = chat_of(pilot)
            await until(pilot, lambda: chat.status_line.facts.activity == ("loading weights", 0.5))
            worker = next(each for each in pilot.app.workers if each.group == "load")
            chat.loader.leave(chat)
            backend.gate.set()
            await until(pilot, lambda: worker.is_finished)
            assert worker.error is None
            chat.loader.join(chat, pull=False)  # removed with its screen

    asyncio.run(flow())


def test_a_prompt_waits_for_its_model_and_fails_if_the_load_fails(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()])
    backend.gate.clear()

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = chat_of(pilot)
            await say(pilot, "Hi")
            await until(pilot, lambda: len(chat.conversation.messages) == 2)
            await pilot.press("escape")
            message = await answered(pilot)
            assert message.finish_reason == FinishReason.ERROR
            assert "No model is loaded" in str(message.error)
            backend.gate.set()
            await say(pilot, "/load tiny")
            await loaded(pilot)
            await say(pilot, "/regenerate")
            await until(pilot, lambda: chat.conversation.messages[-1].content == "One.")

    asyncio.run(flow())


def test_a_new_chat_does_not_wait_for_the_model_that_the_old_one_waits_for(make_app: MakeApp) -> None:
    backend = FakeBackend()
    backend.gate.clear()

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = chat_of(pilot)
            await say(pilot, "Too early")
            await until(pilot, lambda: chat.busy)
            await pilot.press("ctrl+n")
            await until(pilot, lambda: not chat.conversation.messages)
            assert chat.loader.busy
            backend.gate.set()
            await loaded(pilot)
            assert not chat.busy
            assert backend.requests == []

    asyncio.run(flow())


def test_a_load_that_another_one_replaces_does_not_count(make_app: MakeApp) -> None:
    backend = FakeBackend()
    backend.gate.clear()

    async def flow() -> None:
        async with make_app(backend, "slow").run_test() as pilot:
            chat = chat_of(pilot)
            await until(pilot, lambda: chat.status_line.facts.activity == ("loading weights", 0.5))
            await say(pilot, "/load quick")
            await until(pilot, lambda: backend.asked == ["slow", "quick"])
            backend.gate.set()
            await until(pilot, lambda: chat.info and chat.info.name == "quick")
            assert chat.conversation.model == "quick"

    asyncio.run(flow())
    assert backend.loaded == ["quick"]


def test_the_model_used_last_is_looked_for_on_this_machine_alone(make_app: MakeApp, store: SessionStore) -> None:
    asked: list[tuple[str, bool]] = []

    class Noting(FakeBackend):
        def load(self, name, progress, pull=True):  # type: ignore[no-untyped-def]
            asked.append((name, pull))
            return super().load(name, progress, pull)

    async def flow(model: str) -> None:
        async with make_app(Noting(), model).run_test() as pilot:
            await loaded(pilot)

    asyncio.run(flow("named"))
    asyncio.run(flow(""))
    assert asked == [("named", True), ("named", False)]


def test_an_answer_is_kept_when_the_program_ends(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("Half")])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "Go")
            await until(pilot, lambda: chat.conversation.messages and chat.conversation.messages[-1].content == "Half")

    asyncio.run(flow())
    kept = store.path(store.sessions()[0].id)[-1]
    assert (kept.content, kept.finish_reason) == ("Half", FinishReason.CANCELLED)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No model of this machine is visible."""
    use_own_places(tmp_path, monkeypatch)
    for variable in ("OLLAMA_MODELS", "HF_HUB_CACHE", "HF_HOME", "LLAMA_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def a_model(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_pull_shows_progress_and_stops_when_abandoned(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.library.pull.TELL_S", 0)
    settings = Settings()
    with ModelServer().running() as server:
        server.add_ollama("library/one", "latest", {"model": a_model(home / "one.gguf"), "system": b"Be brief."})
        name = f"{server.host}/library/one"
        told: list[tuple[str, float]] = []

        def stop(what: str, share: float) -> None:
            raise LoadStoppedError("Nobody waits.")

        with pytest.raises(LoadStoppedError):
            find_or_pull(name, settings, stop)
        assert list(users_models(settings)) == []
        model = find_or_pull(name, settings, lambda what, share: told.append((what, share)))
        assert model.path.is_file()
        assert told[0] == (f"asking for {name}", 0.0)
        assert told[-1][1] == 1.0
        assert told[-1][0].startswith(f"pulling {name}, ")
        told.clear()
        assert find_or_pull(name, settings, stop).path == model.path  # it is here now


def test_suggestions_are_those_that_are_not_here(home: Path) -> None:
    choices = model_choices(Settings(), None, None)
    to_pull = [choice for choice in choices if not choice.here]
    assert 5 <= len(to_pull) <= 8
    assert all(choice.suits and choice.licence and choice.memory for choice in to_pull)
    write_ollama_model(
        home / ".ollama" / "models", "registry.ollama.ai/library/qwen3/0.6b", {"model": a_model(home / "one.gguf")}
    )
    later = model_choices(Settings(), None, None)
    here = {choice.name: choice.here for choice in later}
    assert here["qwen3:0.6b"] is True
    assert len([choice for choice in later if choice.name == "qwen3:0.6b"]) == 1


def test_a_new_model_removes_old_errors_and_what_was_said_of_the_last_one(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            chat.transcript.tell("It tells stories.")
            await say(pilot, "/exprot")
            await until(pilot, lambda: chat.query(".failure"))
            chat.prompt.text = ""
            await say(pilot, "/load other")
            await until(pilot, lambda: backend.loaded == ["tiny", "other"] and chat.info)
            await until(pilot, lambda: not chat.query(".failure"))
            assert not chat.query_one("Welcome .notice", Static).display
            await ask(pilot, "Go")
            chat.transcript.tell("It tells stories.")
            await until(pilot, lambda: chat.query(".of-model"))
            await say(pilot, "/load third")
            await until(pilot, lambda: backend.loaded[-1] == "third" and not chat.query(".of-model"))

    asyncio.run(flow())


def test_one_name_everywhere(make_app: MakeApp, store: SessionStore) -> None:
    path = "/models/of mine/Story-Q8_0.gguf"
    backend = FakeBackend([said("One."), ended()])

    async def flow() -> None:
        async with make_app(backend, model=path).run_test(size=(120, 30)) as pilot:
            chat = await loaded(pilot)
            await until(pilot, lambda: chat.title_bar.model == "Story-Q8_0.gguf")
            assert chat.status_line.facts.model == "Story-Q8_0.gguf"
            await ask(pilot, "Go")
            await pilot.press("f3")
            await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
            assert "Story-Q8_0.gguf" in str(pilot.app.screen.query_one(OptionList).get_option_at_index(0).prompt)

    asyncio.run(flow())
    assert [short_name(name) for name in ("qwen3:0.6b", "hf.co/a/B-GGUF:Q4", "C:\\m\\x.gguf", "./m/")] == [
        *("qwen3:0.6b", "B-GGUF:Q4", "x.gguf", "m"),
    ]


@pytest.mark.parametrize("way", ["load", "new", "open"])
def test_what_stops_an_answer_asks_first(way: str, make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()], [said("Half an answer")])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            first = chat.conversation.session_id
            await pilot.press("ctrl+n")
            await until(pilot, lambda: not chat.conversation.messages)
            await say(pilot, "Second")
            await until(pilot, lambda: chat.conversation.messages and chat.conversation.messages[-1].content)

            async def do() -> None:
                if way == "load":
                    await say(pilot, "/load other")
                elif way == "new":
                    await pilot.press("ctrl+n")
                else:
                    pilot.app.run_worker(open_session(chat, first or 0))
                await until(pilot, lambda: isinstance(pilot.app.screen, QuestionScreen))

            await do()
            await pilot.press("enter")  # lets it finish
            await until(pilot, lambda: pilot.app.screen is chat)
            assert chat.busy and backend.loaded == ["tiny"] and len(chat.conversation.messages) == 2
            await do()
            await pilot.press("escape")
            await until(pilot, lambda: pilot.app.screen is chat)
            assert chat.busy
            message = chat.conversation.messages[-1]
            await do()
            await pilot.press("down", "enter")
            await until(pilot, lambda: not chat.busy and message.finish_reason == "cancelled")
            assert message.content == "Half an answer"
            if way == "load":
                await until(pilot, lambda: backend.loaded == ["tiny", "other"])
            else:
                await until(pilot, lambda: message not in chat.conversation.messages)

    asyncio.run(flow())


def test_the_footer_of_an_idle_chat_stops_nothing(make_app: MakeApp) -> None:
    backend = FakeBackend()
    backend.gate.clear()

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = chat_of(pilot)
            bar = chat.query_one(KeyBar)
            await until(pilot, lambda: "Esc Stop" in str(bar.content))
            backend.gate.set()
            await until(pilot, lambda: chat.info)
            await until(pilot, lambda: "Esc Stop" not in str(bar.content) and "F1 Help" in str(bar.content))

    asyncio.run(flow())


def test_the_picker_completes_paths(make_app: MakeApp, tmp_path: Path) -> None:
    folder = tmp_path / "my models"
    (folder / "old").mkdir(parents=True)
    for name in ("one.gguf", "two.GGUF", "notes.txt"):
        (folder / name).write_bytes(b"GGUF")
    backend, shown = FakeBackend(), with_slashes(str(folder))

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            await loaded(pilot)
            await pilot.press("f4")
            await until(pilot, lambda: isinstance(pilot.app.screen, PickerScreen) and pilot.app.screen.choices)
            screen = pilot.app.screen
            assert isinstance(screen, PickerScreen)
            entries, field = screen.entries, screen.field

            def listed() -> list[str]:
                return [str(entries.get_option_at_index(at).prompt) for at in range(entries.option_count)]

            field.value = f"{tmp_path}/my"
            await until(pilot, lambda: listed() == ["my models/"])
            await pilot.press("tab")
            await until(pilot, lambda: field.value == f"{shown}/" and len(listed()) == 3)
            assert listed() == ["old/", "one.gguf  4 B", "two.GGUF  4 B"]
            assert "2 .gguf files" in str(screen.memory.content)
            await pilot.press("enter")  # a folder is entered, not loaded
            await until(pilot, lambda: field.value == f"{shown}/old/")
            assert "No .gguf file" in str(screen.memory.content)
            await pilot.press("enter")
            await pilot.pause()
            assert pilot.app.screen is screen
            field.value = f"{folder}/t"
            await until(pilot, lambda: len(listed()) == 1)
            await pilot.press("enter")
            await until(pilot, lambda: backend.loaded[-1] == f"{shown}/two.GGUF")

    asyncio.run(flow())
