"""The chat on a real tiny model."""

import asyncio
from pathlib import Path

import pytest

from localllm.chats import Role, SessionStore
from localllm.engine.request import FinishReason
from localllm.settings import Settings
from tests.fakes.scripted_model import write_scripted_model
from tests.systems import use_own_places
from tests.tui.chatting import answered, ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp
from tui.engine_backend import EngineBackend
from tui.screens.approval import ApprovalScreen
from tui.screens.inspector import InspectorScreen


def test_calls_without_markers_run_once_they_are_allowed(
    make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {
        "0": 'I look first.\n```json\n{"name": "read_file", "arguments": {"path": "a.txt", "start": 1}}\n```',
        "1": '{"name": "run_command", "arguments": {"command": "echo made > b.txt"}}',
        "2": '```json\n{"name": "delete_file", "arguments": {"path": "b.txt"}}\n```\nThat is no tool.',
    }
    use_own_places(tmp_path, monkeypatch)
    model = write_scripted_model(tmp_path / "scripted.gguf", scripts)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.txt").write_text("words of a\n")
    monkeypatch.chdir(folder)
    backend = EngineBackend(lambda _: Settings(disk_cache=False, kv_mib=64, threads=1, backend="native"))

    async def flow() -> None:
        async with make_app(backend, str(model)).run_test(size=(120, 40)) as pilot:
            chat = await loaded(pilot)
            await say(pilot, "/tools on")
            await until(pilot, lambda: chat.query(".note"))
            await say(pilot, "Make b.txt")
            await until(pilot, lambda: isinstance(pilot.app.screen, ApprovalScreen) and pilot.app.focused)
            assert not (folder / "b.txt").exists()
            await pilot.press("down", "enter")
            await until(pilot, lambda: len(chat.conversation.messages) == 6)
            last = await answered(pilot)
            found = [(message.role, message.content) for message in chat.conversation.messages]
            assert found[1:3] == [(Role.ASSISTANT, "I look first."), (Role.TOOL, "words of a\n")]
            assert [role for role, _ in found[3:]] == [Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
            assert (folder / "b.txt").read_text() == "made\n"
            assert last.content == scripts["2"] and not last.calls

    try:
        asyncio.run(flow())
    finally:
        backend.close()


@pytest.mark.slow
def test_a_story_is_generated_stopped_and_shown_in_the_inspector(
    make_app: MakeApp, store: SessionStore, data_dir: Path
) -> None:
    model = data_dir / "models" / "gguf" / "stories260K-F32.gguf"
    backend = EngineBackend(lambda _: Settings(disk_cache=False, kv_mib=64, threads=1))

    async def flow() -> None:
        async with make_app(backend, str(model)).run_test(size=(120, 40)) as pilot:
            chat = await loaded(pilot)
            await say(pilot, "/set temperature 0")
            await say(pilot, "/set max_tokens 24")
            answer = await ask(pilot, "Once upon a time")
            assert answer.finish_reason == FinishReason.LENGTH
            assert answer.stats["generated"] == 24
            assert answer.content.startswith(", there was a little girl named Lily")
            assert chat.status_line.facts.counts.prompt == answer.stats["prompt"]
            await say(pilot, "/regenerate")
            await until(pilot, lambda: chat.conversation.messages[-1].id != answer.id)
            await until(pilot, lambda: chat.conversation.messages[-1].finish_reason)
            again = chat.conversation.messages[-1]
            assert again.content == answer.content
            assert again.stats["cached"] == again.stats["prompt"] - 1  # all but the last token, whose logits are needed
            await pilot.press("f2")
            await until(pilot, lambda: isinstance(pilot.app.screen, InspectorScreen))
            snapshot = await asyncio.wrap_future(backend.inspect())  # type: ignore[arg-type]
            assert sum(step.prefill for step in snapshot.steps) == answer.stats["prompt"] + 1
            assert chat_of(pilot).latency.ttft

    try:
        asyncio.run(flow())
    finally:
        backend.close()
    assert len(store.path(store.sessions()[0].id)) == 2
