"""The tools of a chat: approval by the user, and the rounds of model answers and tool calls."""

import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from localllm.answer.tool_calls import ToolCall
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError, RequestError
from localllm.tools.action import MAX_ROUNDS, Action, MalformedCallError, Toolbox, ToolError, failure
from localllm.tools.approvals import Approvals, approvals_path
from localllm.tools.builtin import builtin_tools
from localllm.tools.editing import diff
from localllm.tools.folder import Folder
from localllm.tools.journal import Journal, journal_path
from localllm.tools.mcp_servers import McpServers, read_servers, servers_path
from tui.backend import ModelInfo, short_name
from tui.background import in_thread
from tui.screens.approval import ApprovalScreen, Decision
from tui.screens.chat_view import ChatView
from tui.sessions import Message
from tui.widgets.frame import Note
from tui.widgets.messages import AnswerView

REFUSED = "The user refused this call."
STOPPED = "The user stopped before this call."

# Asks the model once: (the view whose answer to continue, tool_choice) -> the saved answer, if any.
AskModel = Callable[[AnswerView | None, str | None], Awaitable[Message | None]]


class ChatTools:
    """The tools of the current folder and of the MCP servers, opened on first use. `close` ends the servers.

    Call methods that ask the user from a worker. problems: why servers did not start.
    """

    def __init__(self, chat: ChatView) -> None:
        self.folder = Folder(_current_folder())
        self.problems: list[str] = []
        self.rounds = 0  # rounds of tool calls since the user's last message
        self._chat, self._conversation = chat, chat.conversation
        self._lock = threading.Lock()
        self._servers: McpServers | None = None
        self._toolbox: Toolbox | None = None
        self._approvals: dict[int | None, Approvals] = {}
        self._journal = Journal(journal_path(), self.folder.root)

    @property
    def approvals(self) -> Approvals:
        """The approval rules of this chat. Raises SettingsError if the saved ones cannot be read."""
        session_id = self._conversation.session_id
        if session_id not in self._approvals:
            self._approvals[session_id] = Approvals(self.folder.root, approvals_path())
        return self._approvals[session_id]

    def open(self) -> Toolbox:
        """The tools; the first call starts the MCP servers. May block. Raises SettingsError if misconfigured."""
        with self._lock:
            if self._toolbox is None:
                self._servers = McpServers(read_servers(servers_path()))
                self.problems = self._servers.problems
                self._toolbox = Toolbox([*builtin_tools(self.folder, self._journal), *self._servers.tools])
            return self._toolbox

    async def offered(self, info: ModelInfo) -> list[dict[str, Any]]:
        """The tools offered to the model; [] if tools are off.

        Raises RequestError if the model cannot call tools or document excerpts are in the chat, and SettingsError.
        """
        if not self._conversation.parameters.tools:
            return []
        if self._conversation.has_excerpts:
            raise RequestError(
                "Documents in this chat could trigger tool calls. Use /tools off, or /new for a chat with tools."
            )
        if not info.converses:
            raise RequestError(
                f"{short_name(info.name)} has no chat template, so it cannot call tools. Use /tools off."
            )
        return (await in_thread(self.open)).offered()

    def close(self) -> None:
        """End the servers. Idempotent."""
        if self._servers is not None:
            self._servers.close()

    async def answer(self, ask_model: AskModel, view: AnswerView | None) -> Message | None:
        """Ask the model and run its tool calls, until it makes no more calls or MAX_ROUNDS are reached.

        A malformed call is repeated, constrained by its tool's schema. Errors are shown. Returns the last answer, None
        if it was stopped or there is none.
        """
        self.rounds = 0
        try:
            return await self._answer(ask_model, view)
        except LocalLLMError as error:
            self._chat.show_error(str(error))
            return None

    async def _answer(self, ask_model: AskModel, view: AnswerView | None) -> Message | None:
        # An answer that stopped at MAX_ROUNDS continues with its pending calls.
        waits = view is not None and self._calls(view.message)
        message = view.message if view is not None and waits else await ask_model(view, None)
        while message is not None and self._calls(message):
            if self.rounds >= MAX_ROUNDS:
                again = f"Stopped after {MAX_ROUNDS} rounds of tools. /continue allows {MAX_ROUNDS} more."
                await self._chat.transcript.note(Note(again))
                return None
            self.rounds += 1
            must_call = await self._answer_calls(message)
            message = None if self._chat.stopping.is_set() else await ask_model(None, must_call)
        return message

    async def undo(self) -> str:
        """Undo the newest file change in the folder; ask first if another chat made it.

        Returns the diff, "" if the user refuses. Raises RequestError if there is nothing to undo, and ToolError.
        """
        journal, chat = self._journal, self._owner
        while change := await in_thread(journal.newest):
            name = self.folder.name(change.path)
            text = diff(name, change.after, change.before)
            if change.owner != chat:
                action = Action("undo", name, text, lambda _stop: "", is_diff=True)
                if await self._ask(action, threading.Event()) is Decision.REFUSE:
                    return ""
            if await in_thread(lambda change=change: journal.undo(change)):  # type: ignore[misc]
                return text
        raise RequestError("There is nothing to undo: no chat was deleted, no file in this folder was changed.")

    @property
    def _owner(self) -> str:
        return f"chat {self._conversation.session_id}"

    def _calls(self, message: Message) -> bool:
        ended = message.finish_reason == FinishReason.STOP
        return ended and bool(message.calls) and self._conversation.parameters.tools

    async def _answer_calls(self, message: Message) -> str | None:
        """Append a result for each call; returns the name of a tool whose call was malformed, if any."""
        facts, must_call = self._chat.status_line.facts, None
        toolbox = await in_thread(self.open)
        self._journal.owner = self._owner
        try:
            for call in self._conversation.unanswered_calls(message):
                facts.tool = f"{call.name[:32]}, round {self.rounds} of {MAX_ROUNDS}"
                self._chat.status_line.redraw()
                try:
                    result = await self._carried_out(toolbox, call)
                except MalformedCallError as error:
                    must_call, result = toolbox.must_call(call), failure(error)
                except ToolError as error:
                    result = failure(error)
                await self._chat.transcript.append(self._conversation.add_result(call, result))
        finally:
            facts.tool = ""
            self._chat.status_line.redraw()
        return must_call

    async def _carried_out(self, toolbox: Toolbox, call: ToolCall) -> str:
        stop = self._chat.stopping
        if stop.is_set():
            raise ToolError(STOPPED)
        action = await in_thread(lambda: toolbox.plan(call))
        if not self.approvals.allow(action):
            decision = await self._ask(action, stop)
            if decision is Decision.REFUSE:
                raise ToolError(STOPPED if stop.is_set() else REFUSED)
            if decision is not Decision.ONCE:
                try:
                    self.approvals.add(action, lasting=decision is Decision.ALWAYS)
                except LocalLLMError as error:
                    self._chat.show_error(str(error))
        return await in_thread(lambda: action.result(stop))

    async def _ask(self, action: Action, stop: threading.Event) -> Decision:
        """Show an action and wait for the decision; setting `stop` refuses it."""
        chat = self._chat
        chat.asking = True
        try:
            return await chat.app.push_screen_wait(ApprovalScreen(action, stop, chat.prompt.insert), mode=chat.mode)
        finally:
            chat.asking = False


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed; the chat still works, and tools report the missing folder
        return Path(os.environ.get("PWD", os.sep))
