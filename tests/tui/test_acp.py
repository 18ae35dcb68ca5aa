"""The agent for editors, driven by the client of the protocol's SDK."""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import acp
import numpy as np
import pytest
from acp import schema, text_block

from gguf_io.runner_info import LoadProgress
from localllm.actions.action import Action, Tool
from localllm.actions.approvals import approvals_path
from localllm.answer.event import AnswerEvent, AnswerPart, PartKind
from localllm.answer.tool_calls import ToolCall
from localllm.chats import Role, SessionStore
from localllm.chats.parameters import Parameters
from localllm.engine.request import FinishReason
from localllm.settings import journal_path
from localllm.wings.tools.journal import Journal
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.fakes.scripted_model import call, write_scripted_model
from tests.gguf_io.test_sounds import wav
from tests.systems import make_terminal, needs_commands, use_own_places
from tui.acp.agent import LocalAgent
from tui.backend import LoadedInfo

DONE = [said("Done."), ended()]
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def calls(*wanted: tuple[str, dict[str, Any]]) -> list[AnswerEvent]:
    """An answer with tool calls."""
    made = tuple(ToolCall(name, arguments) for name, arguments in wanted)
    return [AnswerEvent((AnswerPart(PartKind.TOOL_CALLS, "<tool_call>", made),)), ended()]


def edit(path: str, old: str, new: str) -> tuple[str, dict[str, Any]]:
    return "edit_file", {"path": path, "old_text": old, "new_text": new}


class Untitled(FakeBackend):
    """A model too small to write titles, so that every script is an answer."""

    def load(self, name: str, progress: LoadProgress, pull: bool = True) -> LoadedInfo:
        self.info = replace(super().load(name, progress, pull), titles=False)
        return self.info


def model(*scripts: Sequence[AnswerEvent]) -> FakeBackend:
    return Untitled(*scripts, converses=True)


class Editor:
    """The client: notes all updates, and answers questions as the test says."""

    def __init__(self, *decisions: str | None) -> None:
        """decisions: the ids of the options to choose, in turn; None cancels the question. Without any: no answer."""
        self.decisions = list(decisions)
        self.updates: list[Any] = []
        self.asked: list[tuple[schema.ToolCallUpdate, list[schema.PermissionOption]]] = []
        self.agent: Any = None
        self.offers = schema.ClientCapabilities()

    def on_connect(self, agent: Any) -> None:
        self.agent = agent

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append(update)

    async def request_permission(
        self, session_id: str, tool_call: schema.ToolCallUpdate, options: list[schema.PermissionOption], **_: Any
    ) -> schema.RequestPermissionResponse:
        self.asked.append((tool_call, options))
        if not self.decisions:
            await asyncio.Event().wait()
        chosen = self.decisions.pop(0)
        outcome: Any = schema.DeniedOutcome(outcome="cancelled")
        if chosen is not None:
            outcome = schema.AllowedOutcome(outcome="selected", option_id=chosen)
        return schema.RequestPermissionResponse(outcome=outcome)

    def texts(self, kind: str) -> str:
        """The text of all chunks of a kind, such as agent_message_chunk."""
        return "".join(one.content.text for one in self.updates if one.session_update == kind)

    def statuses(self, identity: str) -> list[str]:
        return [one.status for one in self.updates if getattr(one, "tool_call_id", "") == identity]

    def last(self, kind: str) -> Any:
        return next(one for one in reversed(self.updates) if one.session_update == kind)


class Channel:
    """One end of a pair of queues, as the SDK's Transport."""

    def __init__(self, incoming: "asyncio.Queue[Any]", outgoing: "asyncio.Queue[Any]") -> None:
        self._incoming, self._outgoing = incoming, outgoing

    async def send(self, message: dict[str, Any]) -> None:
        await self._outgoing.put(message)

    async def receive(self) -> Any:
        return await self._incoming.get()

    async def close(self) -> None:
        await self._outgoing.put(None)


@asynccontextmanager
async def connected(
    backend: FakeBackend, store: SessionStore, editor: Editor, name: str = "tiny"
) -> AsyncIterator[Any]:
    """The agent with a client connected, which offers what the editor does; yields the client's connection."""
    left: asyncio.Queue[Any] = asyncio.Queue()
    right: asyncio.Queue[Any] = asyncio.Queue()
    agent: Any = LocalAgent(backend, store, name, Parameters(), "model")
    serving = asyncio.ensure_future(acp.run_agent(agent, Channel(left, right)))
    ours: Any = acp.connect_to_agent(editor, Channel(right, left))  # type: ignore[arg-type]
    try:
        answer = await ours.initialize(protocol_version=acp.PROTOCOL_VERSION, client_capabilities=editor.offers)
        assert answer.protocol_version == acp.PROTOCOL_VERSION and answer.agent_info.name == "localllm"
        yield ours
    finally:
        await ours.close()
        await serving
        agent.close()


Flow = Callable[[Any, str], Awaitable[None]]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    opened = SessionStore(tmp_path / "sessions.db")
    yield opened
    opened.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_own_places(tmp_path, monkeypatch)
    made = tmp_path / "my project"
    made.mkdir()
    (made / "a.txt").write_text("one\ntwo\n")
    return made


@pytest.fixture
def play(store: SessionStore, folder: Path) -> Callable[..., None]:
    """Run a scenario in a new session of the folder."""

    def run(backend: FakeBackend, editor: Editor, flow: Flow, **options: Any) -> None:
        async def whole() -> None:
            async with asyncio.timeout(30), connected(backend, store, editor) as agent:
                session = await agent.new_session(cwd=str(folder), mcp_servers=[], **options)
                await flow(agent, session.session_id)

        asyncio.run(whole())

    return run


async def until(condition: Callable[[], object]) -> None:
    """Let others run until the condition holds; the time limit is that of the scenario."""
    while not condition():
        await asyncio.sleep(0.01)


async def say(agent: Any, session: str, *blocks: Any) -> str:
    """Send a prompt of texts and blocks; returns why its answer ended."""
    prompt = [text_block(block) if isinstance(block, str) else block for block in blocks]
    return str((await agent.prompt(session_id=session, prompt=prompt)).stop_reason)


async def refused(work: Awaitable[Any]) -> str:
    with pytest.raises(acp.RequestError) as info:
        await work
    return str(info.value)


def test_an_answer_streams_thoughts_text_and_usage(play: Callable[..., None], store: SessionStore) -> None:
    editor = Editor()
    backend = model([said("Hm. ", PartKind.REASONING), said("Hello "), said("there."), ended()])

    async def flow(agent: Any, session: str) -> None:
        assert await say(agent, session, "Hi") == "end_turn"
        assert editor.texts("agent_thought_chunk") == "Hm. "
        assert editor.texts("agent_message_chunk") == "Hello there."
        used = editor.last("usage_update")
        assert (used.used, used.size) == (12 + 41, 4096)
        commands = editor.last("available_commands_update").available_commands
        assert [command.name for command in commands] == ["undo", "compact", "continue"]

    play(backend, editor, flow)
    path = store.path(store.sessions()[0].id)
    assert [(one.role, one.content, one.reasoning) for one in path] == [
        (Role.USER, "Hi", ""),
        (Role.ASSISTANT, "Hello there.", "Hm. "),
    ]
    assert [tool["function"]["name"] for tool in backend.requests[0].tools][:2] == ["read_file", "list_files"]


def test_a_read_needs_no_question_and_shows_its_result(play: Callable[..., None]) -> None:
    editor, backend = Editor(), model(calls(("read_file", {"path": "a.txt"})), DONE)

    async def flow(agent: Any, session: str) -> None:
        assert await say(agent, session, "Look") == "end_turn"
        start = editor.last("tool_call")
        assert (start.kind, start.title, start.raw_input) == ("read", "read_file a.txt", {"path": "a.txt"})
        assert Path(start.locations[0].path).read_text() == "one\ntwo\n"
        assert editor.statuses(start.tool_call_id) == ["pending", "in_progress", "completed"]
        assert editor.last("tool_call_update").content[0].content.text == "one\ntwo\n"

    play(backend, editor, flow)
    assert editor.asked == []
    assert backend.requests[1].messages[-1] == {"role": "tool", "tool_name": "read_file", "content": "one\ntwo\n"}


def test_an_edit_is_asked_for_with_its_diff_journalled_and_undone(play: Callable[..., None], folder: Path) -> None:
    editor, backend = Editor("once"), model(calls(edit("a.txt", "two", "2")), DONE)

    async def flow(agent: Any, session: str) -> None:
        assert await say(agent, session, "Change it") == "end_turn"
        shown, options = editor.asked[0]
        (diff,) = shown.content or []
        assert isinstance(diff, schema.FileEditToolCallContent)
        assert (diff.old_text, diff.new_text) == ("one\ntwo\n", "one\n2\n")
        assert Path(diff.path) == folder / "a.txt"
        assert [(one.option_id, one.kind) for one in options] == [
            ("once", "allow_once"),
            ("chat", "allow_always"),
            ("always", "allow_always"),
            ("refuse", "reject_once"),
        ]
        assert "edit_file *.txt" in options[1].name
        assert (folder / "a.txt").read_text() == "one\n2\n"
        assert editor.last("tool_call_update").content is None  # the diff stays
        assert await say(agent, session, "/undo") == "end_turn"
        assert (folder / "a.txt").read_text() == "one\ntwo\n" and "-2" in editor.texts("agent_message_chunk")
        assert "nothing to undo" in await refused(say(agent, session, "/undo"))

    play(backend, editor, flow)


@pytest.mark.parametrize("decision", ["refuse", None, "no such option"])
def test_what_is_not_allowed_does_not_run(play: Callable[..., None], folder: Path, decision: str | None) -> None:
    editor, backend = Editor(decision), model(calls(("run_command", {"command": "touch made"})), DONE)

    async def flow(agent: Any, session: str) -> None:
        assert await say(agent, session, "Go") == "end_turn"
        assert editor.statuses("call-2") == ["pending", "failed"]
        assert editor.asked[0][0].content[0].content.text == "touch made"  # type: ignore[union-attr,index]

    play(backend, editor, flow)
    assert not (folder / "made").exists()
    assert backend.requests[1].messages[-1]["content"] == "Error: The user refused this call."


def test_rules_of_the_chat_and_of_the_folder_are_kept(play: Callable[..., None]) -> None:
    editor = Editor("chat", "always")
    commands = [("run_command", {"command": text}) for text in ("echo a", "echo a b", "cat a.txt")]
    backend = model(calls(commands[0]), calls(commands[0]), calls(commands[1]), calls(commands[2]), DONE)

    async def flow(agent: Any, session: str) -> None:
        await say(agent, session, "Go")

    play(backend, editor, flow)
    assert [shown.raw_input["command"] for shown, _ in editor.asked] == ["echo a", "cat a.txt"]
    assert "cat a.txt *" in approvals_path().read_text()


def test_a_client_that_cannot_ask_allows_nothing(play: Callable[..., None], folder: Path) -> None:
    class Silent(Editor):
        async def request_permission(self, *_: Any, **__: Any) -> Any:
            raise acp.RequestError.method_not_found("session/request_permission")

    editor, backend = Silent(), model(calls(("run_command", {"command": "touch made"})), DONE)

    async def flow(agent: Any, session: str) -> None:
        assert await say(agent, session, "Go") == "end_turn"

    play(backend, editor, flow)
    assert not (folder / "made").exists()
    assert "could not ask" in backend.requests[1].messages[-1]["content"]


def test_cancel_ends_an_answer_at_once_and_keeps_its_text(play: Callable[..., None], store: SessionStore) -> None:
    editor, backend = Editor(), model([])

    async def flow(agent: Any, session: str) -> None:
        work = asyncio.ensure_future(say(agent, session, "Tell me"))
        await until(lambda: backend.answers)
        backend.answers[0].push(said("Once upon"))
        await until(lambda: editor.texts("agent_message_chunk"))
        waits = asyncio.ensure_future(say(agent, session, "More"))
        await asyncio.sleep(0.1)
        await agent.cancel(session_id=session)
        assert (await work, await waits) == ("cancelled", "cancelled")
        backend.scripts.append(DONE)
        assert await say(agent, session, "Again") == "end_turn"

    play(backend, editor, flow)
    path = store.path(store.sessions()[0].id)
    assert (path[1].content, path[1].finish_reason) == ("Once upon", FinishReason.CANCELLED)


def test_a_prompt_waits_for_the_answer_to_the_one_before(play: Callable[..., None]) -> None:
    editor, backend = Editor(), model([], DONE, DONE)

    async def flow(agent: Any, session: str) -> None:
        first = asyncio.ensure_future(say(agent, session, "One"))
        await until(lambda: backend.answers)
        others = [asyncio.ensure_future(say(agent, session, text)) for text in ("Two", "Three")]
        await asyncio.sleep(0.1)
        assert len(backend.requests) == 1
        backend.answers[0].push(said("First."), ended())
        assert [await one for one in (first, *others)] == ["end_turn"] * 3

    play(backend, editor, flow)
    last = [message["content"] for message in backend.requests[-1].messages if message["role"] == "user"]
    assert last == ["One", "Two", "Three"]


def test_cancel_ends_a_question_that_the_client_never_answers(play: Callable[..., None], folder: Path) -> None:
    editor, backend = Editor(), model(calls(("run_command", {"command": "touch made"})), DONE)

    async def flow(agent: Any, session: str) -> None:
        work = asyncio.ensure_future(say(agent, session, "Go"))
        await until(lambda: editor.asked)
        await agent.cancel(session_id=session)
        assert await work == "cancelled"

    play(backend, editor, flow)
    assert not (folder / "made").exists() and len(backend.requests) == 1


class Answering(Editor):
    """Answers a session's question when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[str, asyncio.Future[str]] = {}

    async def request_permission(
        self, session_id: str, tool_call: schema.ToolCallUpdate, options: list[schema.PermissionOption], **_: Any
    ) -> schema.RequestPermissionResponse:
        self.open[session_id] = asyncio.get_running_loop().create_future()
        outcome = schema.AllowedOutcome(outcome="selected", option_id=await self.open[session_id])
        return schema.RequestPermissionResponse(outcome=outcome)


@needs_commands
def test_a_cancel_within_a_question_leaves_the_other_sessions_question(play: Callable[..., None], folder: Path) -> None:
    """An answer that comes after the cancel runs nothing, and the cancelled session goes on with the next prompt."""
    editor = Answering()
    commands = [calls(("run_command", {"command": f"touch {name}"})) for name in ("first", "second")]
    backend = model(*commands, DONE, DONE)

    async def flow(agent: Any, session: str) -> None:
        other = (await agent.new_session(cwd=str(folder), mcp_servers=[])).session_id
        works = {}
        for one in (session, other):
            works[one] = asyncio.ensure_future(say(agent, one, "Go"))
            await until(lambda one=one: one in editor.open)  # type: ignore[misc]
        await agent.cancel(session_id=session)
        assert await works[session] == "cancelled" and not works[other].done()
        editor.open[session].set_result("once")
        editor.open[other].set_result("once")
        assert await works[other] == "end_turn"
        assert await say(agent, session, "And now?") == "end_turn"

    play(backend, editor, flow)
    assert (folder / "second").exists() and not (folder / "first").exists()
    roles = [message["role"] for message in backend.requests[-1].messages if message["role"] != "system"]
    assert roles == ["user", "assistant", "tool", "user"]  # the call that was not allowed has a result


@needs_commands
def test_cancel_ends_a_command(play: Callable[..., None], folder: Path) -> None:
    editor = Editor("once")
    backend = model(calls(("run_command", {"command": "touch ready; sleep 600"})), DONE)

    async def flow(agent: Any, session: str) -> None:
        work = asyncio.ensure_future(say(agent, session, "Go"))
        await until((folder / "ready").exists)
        await agent.cancel(session_id=session)
        assert await work == "cancelled"

    play(backend, editor, flow)


def test_cancel_does_not_wait_for_the_model_to_load(play: Callable[..., None], store: SessionStore) -> None:
    editor, backend = Editor(), model(DONE)
    backend.gate.clear()

    async def flow(agent: Any, session: str) -> None:
        work = asyncio.ensure_future(say(agent, session, "Hi"))
        await until(store.sessions)
        await agent.cancel(session_id=session)
        assert await work == "cancelled"
        backend.gate.set()
        assert await say(agent, session, "Hi") == "end_turn"

    play(backend, editor, flow)


def test_modes_and_thinking_are_options_of_a_session(play: Callable[..., None], folder: Path) -> None:
    editor = Editor()
    backend = model(calls(edit("a.txt", "two", "2")), DONE, DONE, DONE)

    async def flow(agent: Any, session: str) -> None:
        await agent.set_session_mode(session_id=session, mode_id="edit")
        await say(agent, session, "Change it")
        assert (folder / "a.txt").read_text() == "one\n2\n" and editor.asked == []
        answer = await agent.set_config_option(session_id=session, config_id="mode", value="chat")
        assert {one.id: one.current_value for one in answer.config_options} == {
            "mode": "chat",
            "model": "tiny",
            "thinking": "default",
        }
        await say(agent, session, "Talk")
        await agent.set_config_option(session_id=session, config_id="thinking", value="off")
        await say(agent, session, "Talk")
        assert "no mode 'yolo'" in await refused(agent.set_session_mode(session_id=session, mode_id="yolo"))
        assert "no option 'x'" in await refused(agent.set_config_option(session_id=session, config_id="x", value="y"))

    play(backend, editor, flow)
    assert [bool(request.tools) for request in backend.requests] == [True, True, False, False]
    assert [request.think for request in backend.requests] == [None, None, None, False]


def test_hidden_files_are_asked_for_in_every_mode(play: Callable[..., None], folder: Path) -> None:
    (folder / ".env").write_text("secret\n")
    editor, backend = Editor("refuse"), model(calls(edit(".env", "secret", "x")), DONE)

    async def flow(agent: Any, session: str) -> None:
        await agent.set_session_mode(session_id=session, mode_id="edit")
        await say(agent, session, "Go")

    play(backend, editor, flow)
    assert len(editor.asked) == 1 and (folder / ".env").read_text() == "secret\n"


def test_another_model_is_loaded_for_all_sessions_and_remembered(
    play: Callable[..., None], store: SessionStore
) -> None:
    backend = model(DONE, DONE)
    backend.unavailable.add("gone.gguf")

    async def flow(agent: Any, session: str) -> None:
        await say(agent, session, "Hi")
        answer = await agent.set_config_option(session_id=session, config_id="model", value="beta.gguf")
        option = next(one for one in answer.config_options if one.id == "model")
        assert (option.current_value, [one.value for one in option.options]) == (
            "beta.gguf",
            ["alpha.gguf", "beta.gguf"],
        )
        failed = agent.set_config_option(session_id=session, config_id="model", value="gone.gguf")
        assert "gone.gguf cannot be had" in await refused(failed)
        assert await say(agent, session, "Hi") == "end_turn"

    play(backend, Editor(), flow)
    assert backend.loaded == ["tiny", "beta.gguf"] and store.remembered("model") == "beta.gguf"
    assert store.summary(store.sessions()[0].id).model == "beta.gguf"


def test_without_a_model_a_prompt_says_how_to_choose_one(store: SessionStore, folder: Path) -> None:
    async def flow() -> None:
        async with connected(model(), store, Editor(), name="") as agent:
            session = await agent.new_session(cwd=str(folder), mcp_servers=[])
            assert "No model is chosen" in await refused(say(agent, session.session_id, "Hi"))

    asyncio.run(flow())


def test_a_failed_load_is_the_prompts_error(store: SessionStore, folder: Path) -> None:
    backend = FakeBackend(load_error="No such file: tiny.")

    async def flow() -> None:
        async with connected(backend, store, Editor()) as agent:
            session = await agent.new_session(cwd=str(folder), mcp_servers=[])
            assert await refused(say(agent, session.session_id, "Hi")) == "No such file: tiny."

    asyncio.run(flow())


def test_a_chat_is_listed_loaded_and_replayed(store: SessionStore, folder: Path, tmp_path: Path) -> None:
    first = Editor("once")
    think = [said("Hm.", PartKind.REASONING), said("Done."), ended()]
    backend = model(calls(("read_file", {"path": "a.txt"}), ("run_command", {"command": "exit 3"})), think)

    async def hold() -> str:
        async with connected(backend, store, first) as agent:
            session = await agent.new_session(cwd=str(folder), mcp_servers=[])
            await say(agent, session.session_id, "Look at it")
            await agent.new_session(cwd=str(folder), mcp_servers=[])  # stays empty, so it is not kept
            return str(session.session_id)

    session = asyncio.run(hold())
    again, later = Editor(), model(DONE)

    async def resume() -> None:
        async with connected(later, store, again) as agent:
            listed = (await agent.list_sessions(cwd=str(folder))).sessions
            assert [(one.session_id, one.cwd, one.title) for one in listed] == [(session, str(folder), "Look at it")]
            assert (await agent.list_sessions(cwd=str(tmp_path))).sessions == []
            assert "no session" in await refused(say(agent, session, "Hi"))
            await agent.load_session(cwd=str(folder), session_id=session, mcp_servers=[])
            assert [one.session_update for one in again.updates] == [
                *("user_message_chunk", "tool_call", "tool_call_update", "tool_call", "tool_call_update"),
                *("agent_thought_chunk", "agent_message_chunk", "available_commands_update"),
            ]
            assert again.texts("user_message_chunk") == "Look at it"
            assert await say(agent, session, "And now?") == "end_turn"
            unknown = agent.load_session(cwd=str(folder), session_id="77", mcp_servers=[])
            assert "no chat '77'" in await refused(unknown)

    asyncio.run(resume())
    assert [one["role"] for one in later.requests[0].messages] == [
        *("user", "assistant", "tool", "tool", "assistant", "user"),
    ]


def test_files_pictures_and_links_of_a_prompt_reach_the_model(play: Callable[..., None], folder: Path) -> None:
    editor, backend = Editor(), model(DONE)
    (folder / "b c.py").write_text("x = 1\n")
    blocks = [
        "Compare ",
        acp.resource_link_block("b c.py", (folder / "b c.py").as_uri()),
        " with ",
        acp.resource_block(acp.embedded_text_resource((folder / "a.txt").as_uri() + "#L2:2", "two\n")),
        " and ",
        acp.image_block(base64.b64encode(PNG).decode(), "image/png", uri=(folder / "seen.png").as_uri()),
        " as on ",
        acp.resource_link_block("page", "https://example.org/page"),
    ]

    async def flow(agent: Any, session: str) -> None:
        assert await say(agent, session, *blocks) == "end_turn"

    play(backend, editor, flow)
    (asked,) = backend.requests[0].messages
    picture, text = asked["content"]
    assert picture == {"type": "image", "data": PNG}
    assert 'Compare @"b c.py" with @a.txt#L2:2 and @seen.png as on @https://example.org/page' in text["text"]
    assert "x = 1" in text["text"] and "two" in text["text"] and "one" not in text["text"]


def test_sounds_and_embedded_files_of_a_prompt_reach_the_model(play: Callable[..., None]) -> None:
    sound = wav(np.sin(np.arange(800) / 5), rate=8_000)
    backend = model(DONE)
    blobs = [acp.embedded_blob_resource(f"file:///{name}", base64.b64encode(data).decode()) for name, data in (
        ("fox.png", PNG), ("notes.txt", b"a hut")
    )]  # fmt: skip
    blocks = ["What is said?", acp.audio_block(base64.b64encode(sound).decode(), "audio/wav")]

    async def flow(agent: Any, session: str) -> None:
        assert await say(agent, session, *blocks, *map(acp.resource_block, blobs)) == "end_turn"

    play(backend, Editor(), flow)
    (asked,) = backend.requests[0].messages
    *media, text = asked["content"]
    assert media == [{"type": "image", "data": sound}, {"type": "image", "data": PNG}]
    names = f"@sound-1@{Path('/fox.png')}@{Path('/notes.txt')}"
    assert f"What is said?{names}" in text["text"] and "a hut" in text["text"]


def test_what_cannot_be_given_to_the_model_is_refused_in_words(play: Callable[..., None], folder: Path) -> None:
    (folder / "data.bin").write_bytes(b"\xff\x00\xfe")

    async def flow(agent: Any, session: str) -> None:
        for block, words in (
            (acp.audio_block("AAAA", "audio/wav"), "sound-1 cannot be attached"),
            (acp.image_block(base64.b64encode(b"text").decode(), "image/png"), "picture-1 cannot be attached"),
            (acp.image_block("AAAA", "image/png"), "picture-1 cannot be attached"),
            (acp.image_block("no base64", "image/png"), "is not base64"),
            (acp.resource_link_block("data.bin", (folder / "data.bin").as_uri()), "is not UTF-8 text"),
            (acp.resource_block(acp.embedded_blob_resource("file:///x.pdf", "AAAA")), "x.pdf: cannot be read as PDF"),
            (acp.resource_link_block("a", "file://[x"), "'file://[x' is not a valid URI: Invalid IPv6 URL"),
            (acp.resource_link_block("a", "http://[x"), "'http://[x' is not a valid URI"),
            (acp.resource_link_block("a", "file:///a%00b"), "'file:///a%00b' is not a valid URI"),
            (acp.image_block(base64.b64encode(PNG).decode(), "image/png", uri="file://[x"), "is not a valid URI"),
            (acp.resource_block(acp.embedded_text_resource("file://[x", "text")), "is not a valid URI"),
            (acp.resource_block(acp.embedded_blob_resource("file://[x", "AAAA")), "is not a valid URI"),
            ("  ", "The prompt is empty"),
        ):
            assert words in await refused(say(agent, session, block))

    play(model(), Editor(), flow)


def test_a_folder_must_exist_and_be_absolute(store: SessionStore, folder: Path) -> None:
    async def flow() -> None:
        async with connected(model(), store, Editor()) as agent:
            for cwd in ("relative", str(folder / "missing"), str(folder / "a.txt")):
                assert "not the absolute path" in await refused(agent.new_session(cwd=cwd, mcp_servers=[]))
            more = agent.new_session(cwd=str(folder), mcp_servers=[], additional_directories=[str(folder)])
            assert "one folder" in await refused(more)

    asyncio.run(flow())


def test_mcp_servers_of_the_client_join_those_of_the_file(
    store: SessionStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    class Servers:
        def __init__(self, servers: Any) -> None:
            given.append(servers)
            plan = lambda _: Action("clock__now", "", "now of the MCP server clock", lambda _: "noon", pattern="")  # noqa: E731
            self.tools = [Tool("clock__now", "The time.", {"type": "object"}, plan)]
            self.problems = ["MCP server web: did not start within 30 s."]

        def close(self) -> None:
            given.append("closed")

    monkeypatch.setattr("localllm.wings.tools.builtin.McpServers", Servers)
    monkeypatch.setattr("localllm.wings.tools.builtin.read_servers", lambda _: {"own": {"command": "own"}})
    servers = [
        schema.McpServerStdio(
            name="clock", command="/bin/clock", args=["-u"], env=[schema.EnvVariable(name="TZ", value="UTC")]
        ),
        schema.HttpMcpServer(
            type="http",
            name="web",
            url="http://127.0.0.1:9/mcp",
            headers=[schema.HttpHeader(name="X-Key", value="k")],
        ),
    ]
    editor, backend = Editor("once"), model(calls(("clock__now", {})), DONE)

    async def flow() -> None:
        async with connected(backend, store, editor) as agent:
            session = await agent.new_session(cwd=str(folder), mcp_servers=servers)
            assert await say(agent, session.session_id, "What time is it?") == "end_turn"
            sse = [schema.SseMcpServer(type="sse", name="old", url="http://x", headers=[])]
            assert "only the transports" in await refused(agent.new_session(cwd=str(folder), mcp_servers=sse))

    asyncio.run(flow())
    assert given == [
        {
            "own": {"command": "own"},
            "clock": {"command": "/bin/clock", "args": ["-u"], "env": {"TZ": "UTC"}},
            "web": {"url": "http://127.0.0.1:9/mcp", "headers": {"X-Key": "k"}},
        },
        "closed",
    ]
    assert editor.texts("agent_message_chunk").startswith("MCP server web: did not start")
    assert editor.last("tool_call").kind == "other"
    assert backend.requests[1].messages[-1]["content"] == "noon"


def test_rounds_are_limited_and_continue_resumes(play: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.chats.tool_loop.MAX_ROUNDS", 2)
    monkeypatch.setattr("tui.acp.session.MAX_ROUNDS", 2)
    editor, backend = Editor(), model(*[calls(("list_files", {}))] * 3, DONE)

    async def flow(agent: Any, session: str) -> None:
        assert await say(agent, session, "Go") == "max_turn_requests"
        assert await say(agent, session, "/continue") == "end_turn"
        assert editor.texts("agent_message_chunk").endswith("Done.")

    play(backend, editor, flow)


def test_a_cut_answer_is_marked_and_can_be_continued(play: Callable[..., None], store: SessionStore) -> None:
    backend = model([said("One, "), ended(FinishReason.LENGTH)], [said("two."), ended()])

    async def flow(agent: Any, session: str) -> None:
        assert "no answer to continue" in await refused(say(agent, session, "/continue"))
        assert await say(agent, session, "Count") == "max_tokens"
        assert await say(agent, session, "/continue") == "end_turn"

    play(backend, Editor(), flow)
    assert [one.content for one in store.path(store.sessions()[0].id)] == ["Count", "One, two."]
    assert backend.requests[1].messages[-1]["content"] == "One, "


def test_an_error_of_the_model_is_the_prompts_error(play: Callable[..., None]) -> None:
    async def flow(agent: Any, session: str) -> None:
        assert await refused(say(agent, session, "Hi")) == "It broke."

    play(model([ended(FinishReason.ERROR, "It broke.")]), Editor(), flow)


def test_undo_of_another_chats_change_is_asked_for(play: Callable[..., None], folder: Path) -> None:
    Journal(journal_path(), folder, "chat 0").write(folder / "a.txt", b"one\ntwo\n", b"other\n")
    editor = Editor("refuse", "once")

    async def flow(agent: Any, session: str) -> None:
        await say(agent, session, "/undo")
        assert (folder / "a.txt").read_text() == "other\n"
        await say(agent, session, "/undo")
        assert (folder / "a.txt").read_text() == "one\ntwo\n"

    play(model(), editor, flow)
    assert "made in another chat" in str(editor.asked[0][0].title)


def test_old_turns_are_replaced_by_a_summary(play: Callable[..., None]) -> None:
    backend = model(DONE, DONE, DONE, [said("They talked."), ended()], DONE)

    async def flow(agent: Any, session: str) -> None:
        assert "nothing to summarise" in await refused(say(agent, session, "/compact"))
        for text in ("a", "b", "c"):
            await say(agent, session, text)
        assert await say(agent, session, "/compact") == "end_turn"
        await say(agent, session, "d")

    play(backend, Editor(), flow)
    assert "They talked." in backend.requests[-1].messages[0]["content"]


class Unsaved(Editor):
    """An editor with texts that are not saved, by path. It saves what is written through it, as Zed does."""

    def __init__(self, *decisions: str | None, texts: dict[Path, str], reads: bool = True, writes: bool = True) -> None:
        super().__init__(*decisions)
        self.unsaved, self.written = {str(path): text for path, text in texts.items()}, 0
        files = schema.FileSystemCapabilities(read_text_file=reads, write_text_file=writes)
        self.offers = schema.ClientCapabilities(fs=files)

    async def read_text_file(self, session_id: str, path: str, **_: Any) -> schema.ReadTextFileResponse:
        if path not in self.unsaved and not os.path.exists(path):
            raise acp.RequestError(-32002, "There is no such file.")
        return schema.ReadTextFileResponse(content=self.unsaved.get(path) or Path(path).read_text())

    async def write_text_file(self, session_id: str, path: str, content: str, **_: Any) -> None:
        self.written += 1
        self.unsaved.pop(path, None)
        Path(path).write_text(content)


def test_what_is_not_saved_is_read_edited_and_undone_in_the_editor(play: Callable[..., None], folder: Path) -> None:
    editor = Unsaved("once", texts={folder / "a.txt": "one\nthree\n"})
    backend = model(calls(("read_file", {"path": "a.txt"}), edit("a.txt", "three", "3")), DONE, DONE)

    async def flow(agent: Any, session: str) -> None:
        await say(agent, session, "Change it")
        assert backend.requests[1].messages[-2]["content"] == "one\nthree\n"
        shown = editor.asked[0][0].content[0]
        assert (shown.old_text, shown.new_text) == ("one\nthree\n", "one\n3\n")
        assert (folder / "a.txt").read_text() == "one\n3\n" and editor.written == 1
        await say(agent, session, "/undo")
        assert (folder / "a.txt").read_text() == "one\nthree\n" and editor.written == 2

    play(backend, editor, flow)


def test_refused_edits_are_not_written_by_the_editor(play: Callable[..., None], folder: Path) -> None:
    editor = Unsaved("refuse", texts={folder / "a.txt": "one\nthree\n"})

    async def flow(agent: Any, session: str) -> None:
        await say(agent, session, "Change it")

    play(model(calls(edit("a.txt", "three", "3")), DONE), editor, flow)
    assert editor.written == 0 and (folder / "a.txt").read_text() == "one\ntwo\n"


def test_new_files_and_line_ends_go_through_the_editor(play: Callable[..., None], folder: Path) -> None:
    (folder / "dos.txt").write_bytes(b"one\r\ntwo\r\n")
    editor = Unsaved("once", "once", texts={folder / "dos.txt": "one\ntwo\n"})  # editors hold \n
    backend = model(calls(edit("new/b.txt", "", "b\n"), edit("dos.txt", "two", "2")), DONE)

    async def flow(agent: Any, session: str) -> None:
        await say(agent, session, "Make it")
        assert (folder / "new" / "b.txt").read_text() == "b\n"
        assert (folder / "dos.txt").read_bytes() == b"one\r\n2\r\n"
        assert editor.written == 2
        await say(agent, session, "/undo")
        await say(agent, session, "/undo")

    play(backend, editor, flow)
    assert not (folder / "new").exists() and (folder / "dos.txt").read_bytes() == b"one\r\ntwo\r\n"


def test_an_editor_that_only_reads_keeps_its_unsaved_files(play: Callable[..., None], folder: Path) -> None:
    (folder / "saved.txt").write_text("one")
    editor = Unsaved("once", "once", texts={folder / "a.txt": "one\nthree\n"}, writes=False)
    backend = model(calls(edit("a.txt", "three", "3"), edit("saved.txt", "one", "1")), DONE)

    async def flow(agent: Any, session: str) -> None:
        await say(agent, session, "Change them")

    play(backend, editor, flow)
    assert "has not saved" in backend.requests[1].messages[-2]["content"]
    assert (folder / "a.txt").read_text() == "one\ntwo\n" and (folder / "saved.txt").read_text() == "1"
    assert editor.written == 0


def test_linked_files_of_a_prompt_are_those_of_the_editor(play: Callable[..., None], folder: Path) -> None:
    editor, backend = Unsaved(texts={folder / "a.txt": "not saved"}), model(DONE)

    async def flow(agent: Any, session: str) -> None:
        uri = (folder / "a.txt").as_uri()
        await say(agent, session, "Look at ", schema.ResourceContentBlock(type="resource_link", name="a", uri=uri))

    play(backend, editor, flow)
    assert "not saved" in str(backend.requests[0].messages)


def test_an_editor_that_does_not_answer_is_left_when_the_prompt_is_cancelled(play: Callable[..., None]) -> None:
    class Silent(Unsaved):
        async def read_text_file(self, session_id: str, path: str, **_: Any) -> schema.ReadTextFileResponse:
            await asyncio.Event().wait()
            raise AssertionError

    editor = Silent(texts={})

    async def flow(agent: Any, session: str) -> None:
        asked = asyncio.ensure_future(say(agent, session, "Look"))
        await until(lambda: any(one.session_update == "tool_call" for one in editor.updates))
        await agent.cancel(session_id=session)
        assert await asked == "cancelled"

    play(model(calls(("read_file", {"path": "a.txt"})), DONE), editor, flow)


# With the program itself and a model file.


class Terminals(Editor):
    """An editor that runs commands in terminals of its own."""

    def __init__(self, folder: Path, *decisions: str | None) -> None:
        """folder: where what terminals print is kept."""
        super().__init__(*decisions)
        self.offers = schema.ClientCapabilities(terminal=True)
        self.opened: list[subprocess.Popen[bytes]] = []
        self.released: list[str] = []
        self._printed = folder

    async def create_terminal(
        self, session_id: str, command: str, args: list[str], cwd: str, **_: Any
    ) -> schema.CreateTerminalResponse:
        name = f"t{len(self.opened)}"
        with (self._printed / name).open("wb") as output:
            self.opened.append(subprocess.Popen([command, *args], cwd=cwd, stdout=output))
        return schema.CreateTerminalResponse(terminal_id=name)

    async def wait_for_terminal_exit(
        self, session_id: str, terminal_id: str, **_: Any
    ) -> schema.WaitForTerminalExitResponse:
        process = self._of(terminal_id)
        await until(lambda: process.poll() is not None)
        return schema.WaitForTerminalExitResponse(exit_code=process.returncode)

    async def terminal_output(self, session_id: str, terminal_id: str, **_: Any) -> schema.TerminalOutputResponse:
        return schema.TerminalOutputResponse(output=(self._printed / terminal_id).read_bytes().decode(), truncated=True)

    async def kill_terminal(self, session_id: str, terminal_id: str, **_: Any) -> None:
        self._of(terminal_id).kill()
        self._of(terminal_id).wait()

    async def release_terminal(self, session_id: str, terminal_id: str, **_: Any) -> None:
        await self.kill_terminal(session_id, terminal_id)
        self.released.append(terminal_id)

    def _of(self, terminal_id: str) -> "subprocess.Popen[bytes]":
        return self.opened[int(terminal_id[1:])]


COMMAND = (
    "run_command",
    {"command": "echo in the editor&cd&exit 3" if sys.platform == "win32" else "echo in the editor; pwd; exit 3"},
)


def test_commands_run_in_the_editors_terminals(
    tmp_path: Path, play: Callable[..., None], folder: Path, store: SessionStore
) -> None:
    editor = Terminals(tmp_path, "once")

    async def flow(agent: Any, session: str) -> None:
        assert await say(agent, session, "Run it.") == "end_turn"
        assert editor.released == ["t0"]
        contents = [one.content for one in editor.updates if one.session_update == "tool_call_update" and one.content]
        shown = [each.terminal_id for content in contents for each in content if each.type == "terminal"]
        assert shown == ["t0"]
        last = [one for one in editor.updates if getattr(one, "status", "") == "completed"][-1]
        assert last.content is None  # the terminal stays

    play(model(calls(COMMAND), DONE), editor, flow)
    result = next(one.content for one in store.all_messages(store.sessions()[0].id) if one.role is Role.TOOL)
    assert result == f"[the beginning is left out]\nin the editor\n{folder.resolve()}\n\n[exit status 3]"


def test_a_refused_command_opens_no_terminal(tmp_path: Path, play: Callable[..., None]) -> None:
    editor = Terminals(tmp_path, "refuse")

    async def flow(agent: Any, session: str) -> None:
        await say(agent, session, "Run it.")
        assert not editor.opened

    play(model(calls(COMMAND), DONE), editor, flow)


@needs_commands
def test_cancel_ends_a_command_in_a_terminal(tmp_path: Path, play: Callable[..., None]) -> None:
    editor = Terminals(tmp_path, "once")

    async def flow(agent: Any, session: str) -> None:
        asked = asyncio.ensure_future(say(agent, session, "Wait."))
        await until(lambda: editor.opened)
        await agent.cancel(session_id=session)
        assert await asked == "cancelled"
        await until(lambda: editor.released)
        assert editor.opened[0].returncode

    play(model(calls(("run_command", {"command": "sleep 1000"})), DONE), editor, flow)


@needs_commands
def test_a_command_that_takes_too_long_is_killed_and_its_output_kept(
    tmp_path: Path, play: Callable[..., None], monkeypatch: pytest.MonkeyPatch, store: SessionStore
) -> None:
    monkeypatch.setattr("tui.acp.terminals.LIMIT_S", 1)
    editor = Terminals(tmp_path, "once")

    async def flow(agent: Any, session: str) -> None:
        assert await say(agent, session, "Wait.") == "end_turn"

    play(model(calls(("run_command", {"command": "echo begun; exec sleep 1000"})), DONE), editor, flow)
    assert "begun\n\n[ended after 1 s]" in next(
        one.content for one in store.all_messages(store.sessions()[0].id) if one.role is Role.TOOL
    )


def test_an_editor_that_opens_no_terminal_fails_the_call_only(
    tmp_path: Path, play: Callable[..., None], store: SessionStore
) -> None:
    class Broken(Terminals):
        async def create_terminal(self, *_: Any, **__: Any) -> Any:
            raise acp.RequestError(-32603, "No terminal here.")

    async def flow(agent: Any, session: str) -> None:
        assert await say(agent, session, "Run it.") == "end_turn"

    play(model(calls(COMMAND), DONE), Broken(tmp_path, "once"), flow)
    result = next(one for one in store.all_messages(store.sessions()[0].id) if one.role is Role.TOOL)
    assert result.is_failure and "No terminal here." in result.content


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scripts = {
        "plain": "A title.",
        "0": call("edit_file", path="a.txt", old_text="two", new_text="2"),
        "1": "It has been changed as you wished.",
    }
    return write_scripted_model(tmp_path_factory.mktemp("model") / "scripted.gguf", scripts)


def command_line(scripted: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "localllm", "agent", str(scripted), "--ctx", "8192", *more]


def test_the_program_answers_with_a_real_engine(scripted: Path, folder: Path, tmp_path: Path) -> None:
    editor = Editor("once")
    sessions = tmp_path / "kept.db"

    async def flow() -> None:
        words = command_line(scripted, "--sessions", str(sessions))
        patient = {"shutdown_timeout": 60}
        spawned = acp.spawn_agent_process(editor, words[0], *words[1:], env=os.environ, transport_kwargs=patient)  # type: ignore[arg-type]
        async with spawned as (agent, process):
            await agent.initialize(protocol_version=1)
            session = await agent.new_session(cwd=str(folder), mcp_servers=[])
            assert await say(agent, session.session_id, "Change it") == "end_turn"
            assert (folder / "a.txt").read_text() == "one\n2\n"
            assert editor.texts("agent_message_chunk") == "It has been changed as you wished."
            await until(lambda: any(one.session_update == "session_info_update" for one in editor.updates))
            assert editor.last("session_info_update").title == "A title"
        assert process.returncode == 0

    asyncio.run(flow())
    kept = SessionStore(sessions)
    assert [one.title for one in kept.sessions()] == ["A title"]
    kept.close()


def test_stdout_has_messages_only_and_bad_lines_are_answered(scripted: Path, folder: Path) -> None:
    requests = [{"jsonrpc": "2.0", "id": 1, "method": "no/such"}, {"jsonrpc": "2.0", "id": 2, "method": "session/new"}]
    lines = "".join(f"{line}\n" for line in ("nonsense", "[1]", "", *map(json.dumps, requests)))
    pipe = subprocess.PIPE
    with subprocess.Popen(command_line(scripted), stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder) as process:
        assert process.stdin and process.stdout
        process.stdin.write(lines.encode())
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in range(4)]
        process.stdin.close()
        assert process.stdout.read() == b""
    assert process.returncode == 0
    assert {(one["id"], one["error"]["code"]) for one in answers} == {(None, -32700), (1, -32601), (2, -32602)}


def test_nothing_else_reads_the_clients_messages() -> None:
    code = """
import asyncio, os
from tui.acp.stdio import StandardStreams
async def main():
    streams = StandardStreams()
    await streams.send({"others": os.read(0, 9).decode()})
    await streams.send({"client": await streams.receive()})
asyncio.run(main())
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdin and process.stdout
        assert json.loads(process.stdout.readline()) == {"others": ""}  # before a client has written anything
        process.stdin.write(b'{"id": 1}\n')
        process.stdin.close()
        assert json.loads(process.stdout.read()) == {"client": {"id": 1}}


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
def test_a_signal_ends_the_program(scripted: Path, folder: Path) -> None:
    with subprocess.Popen(
        command_line(scripted), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder
    ) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}\n')
        process.stdin.flush()
        assert b"localllm" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_on_a_terminal_the_command_explains_its_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli.main import main

    monkeypatch.setattr(sys, "argv", ["localllm", "agent"])
    make_terminal(sys.stdin, monkeypatch)
    with pytest.raises(SystemExit) as info:
        main({"agent": "tui.acp.command:agent"})
    assert info.value.code == 2
