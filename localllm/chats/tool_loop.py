"""The loop of a conversation with tools: the model answers, its calls run, and it answers again.

Each front end (the terminal chat, the page, the agent for editors) asks the user and shows the calls in its own way.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from localllm.actions.action import MAX_ROUNDS, Action, MalformedCallError, Toolbox, ToolError, failure
from localllm.actions.approvals import Approvals, Decision, approvals_path
from localllm.actions.folder import Files, Folder, RunCommand
from localllm.answer.tool_calls import ToolCall
from localllm.background import in_thread
from localllm.chats import Message
from localllm.chats.conversation import Conversation
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError, RequestError
from localllm.wings.tools.builtin import FolderTools

REFUSED = "The user refused this call."
STOPPED = "The user stopped before this call."


def refusal(reason: str) -> ToolError:
    """What ToolLoop.ask raises for a refusal with a reason."""
    return ToolError(f"{REFUSED} The user says: {reason}")


# Asks the model once: (whether to continue its partial answer, tool_choice) -> the saved answer, if any.
AskModel = Callable[[bool, str | None], Awaitable[Message | None]]


class ToolLoop(ABC):
    """The tools of a folder and of the MCP servers, opened on first use. `close` ends the servers.

    problems: why servers did not start. rounds: of tool calls since the user's last message. Setting `stopping` ends
    the loop.
    """

    def __init__(
        self,
        conversation: Conversation,
        folder: Path,
        stopping: threading.Event,
        servers: Mapping[str, Mapping[str, Any]] | None = None,
        files: Files | None = None,
        run: RunCommand | None = None,
    ) -> None:
        """servers: MCP servers beside those in mcp.json, in its format. files: where contents are read and written.

        run: what runs commands; None is the system's shell.
        """
        self.folder = Folder(folder, files)
        self.problems: list[str] = []
        self.rounds = 0
        self.stopping = stopping
        self._conversation = conversation
        self._given_servers = servers or {}
        self._lock = threading.Lock()
        self._toolbox: Toolbox | None = None
        self._approvals: dict[int | None, Approvals] = {}
        self._tools = FolderTools(self.folder, run=run)

    @abstractmethod
    async def ask(self, call: ToolCall | None, action: Action) -> Decision:
        """Show an action and wait for the user's decision; setting `stopping` refuses it. call: None for an undo or a
        command of the user's.

        May raise ToolError for a refusal with a reason, which the model gets as the call's result.
        """

    @abstractmethod
    async def show_call(self, call: ToolCall) -> None:
        """A call is about to be checked."""

    @abstractmethod
    async def show_running(self, call: ToolCall, action: Action) -> None:
        """A checked and allowed call is about to run."""

    @abstractmethod
    async def add_result(self, call: ToolCall, result: str) -> None:
        """A call has ended: store its result, or why it did not run (Conversation.add_result), and show it."""

    @abstractmethod
    async def show_note(self, text: str) -> None:
        """Tell the user something that is not part of the conversation."""

    @abstractmethod
    def show_error(self, text: str) -> None:
        """Tell the user what failed; the loop goes on."""

    @property
    def approvals(self) -> Approvals:
        """The approval rules of this chat. Raises SettingsError if the saved ones cannot be read."""
        session_id = self._conversation.session_id
        if session_id not in self._approvals:
            self._approvals[session_id] = Approvals(self.folder.root, approvals_path())
        return self._approvals[session_id]

    def allows(self, action: Action) -> bool:
        """Whether an action may run without asking."""
        return self.approvals.allow(action)

    def open(self) -> Toolbox:
        """The tools; the first call starts the MCP servers. May block. Raises SettingsError if misconfigured."""
        with self._lock:
            if self._toolbox is None:
                self._tools.start_servers(self._given_servers)
                self.problems = self._tools.problems
                self._toolbox = Toolbox(self._tools.tools)
            return self._toolbox

    async def offered(self, model: str, converses: bool) -> list[dict[str, Any]]:
        """The tools offered to a model; [] if tools are off. converses: whether it has a chat template.

        Raises RequestError if the model cannot call tools or document excerpts are in the chat, and SettingsError.
        """
        if not self._conversation.parameters.tools:
            return []
        if self._conversation.has_excerpts:
            raise RequestError(
                "Documents in this chat could trigger tool calls. Switch tools off (/tools off), or begin another chat "
                "for them (/new)."
            )
        if not converses:
            raise RequestError(f"{model} has no chat template, so it cannot call tools. Switch them off (/tools off).")
        return (await in_thread(self.open)).offered()

    def offered_already(self) -> list[dict[str, Any]] | None:
        """The tools offered to the model; None if they are on and not open yet."""
        if not self._conversation.parameters.tools:
            return []
        return self._toolbox.offered() if self._toolbox else None

    def close(self) -> None:
        """End the servers; the next `open` starts them again. Idempotent."""
        self._tools.close()
        self._toolbox = None

    async def run(self, ask_model: AskModel, partial: Message | None = None) -> Message | None:
        """Ask the model and run its tool calls, until it makes no more calls or MAX_ROUNDS are reached.

        partial: an answer to continue. A malformed call is repeated, constrained by its tool's schema. Returns the last
        answer, None if it was stopped or there is none. Raises LocalLLMError.
        """
        self.rounds = 0
        # An answer that stopped at MAX_ROUNDS continues with its pending calls.
        waits = partial is not None and self._calls(partial)
        message = partial if waits else await ask_model(partial is not None, None)
        while message is not None and self._calls(message):
            if self.rounds >= MAX_ROUNDS:
                await self.show_note(f"Stopped after {MAX_ROUNDS} rounds of tools. /continue allows {MAX_ROUNDS} more.")
                return None
            self.rounds += 1
            must_call = await self._answer_calls(message)
            message = None if self.stopping.is_set() else await ask_model(False, must_call)
        return message

    async def undo(self) -> str:
        """Undo the newest file change in the folder; ask first if another chat made it.

        Returns the diff, "" if the user refuses. Raises RequestError if there is nothing to undo, and ToolError.
        """
        journal, chat = self._tools.journal, self._owner
        while change := await in_thread(journal.newest):
            action = self._tools.undoing(change)
            if change.owner != chat and await self.ask(None, action) is Decision.REFUSE:
                return ""
            if await in_thread(lambda change=change: journal.undo(change)):  # type: ignore[misc]
                return action.preview
        raise RequestError("There is nothing to undo: no chat was deleted, no file in this folder was changed.")

    @property
    def _owner(self) -> str:
        return f"chat {self._conversation.session_id}"

    def _calls(self, message: Message) -> bool:
        ended = message.finish_reason == FinishReason.STOP
        return ended and bool(message.calls) and self._conversation.parameters.tools

    async def _answer_calls(self, message: Message) -> str | None:
        """Append a result for each call; returns the name of a tool whose call was malformed, if any."""
        must_call = None
        toolbox = await in_thread(self.open)
        self._tools.journal.owner = self._owner
        for call in self._conversation.unanswered_calls(message):
            await self.show_call(call)
            try:
                result = await self._carried_out(toolbox, call)
            except MalformedCallError as error:
                must_call, result = toolbox.must_call(call), failure(error)
            except ToolError as error:
                result = failure(error)
            await self.add_result(call, result)
        return must_call

    async def _carried_out(self, toolbox: Toolbox, call: ToolCall) -> str:
        stop = self.stopping
        if stop.is_set():
            raise ToolError(STOPPED)
        action = await in_thread(lambda: toolbox.plan(call))
        if not await self._may_run(call, action):
            raise ToolError(STOPPED if stop.is_set() else REFUSED)
        await self.show_running(call, action)
        return await in_thread(lambda: action.result(stop))

    async def run_command(self, command: str) -> str | None:
        """Run a command of the user's in the folder, approved like a model's; returns its output, None if refused.

        Raises ToolError if it cannot be run.
        """
        action = await in_thread(lambda: self._tools.command(command))
        if not await self._may_run(None, action):
            return None
        return await in_thread(lambda: action.result(self.stopping))

    def keep_approvals(self) -> None:
        """The chat has just been stored: what the user allowed before, in this chat, holds for it."""
        if rules := self._approvals.pop(None, None):
            self._approvals[self._conversation.session_id] = rules

    async def _may_run(self, call: ToolCall | None, action: Action) -> bool:
        """Whether a rule or the user allows an action; what the user allows for longer becomes a rule."""
        if self.allows(action):
            return True
        decision = await self.ask(call, action)
        if decision not in (Decision.REFUSE, Decision.ONCE):
            try:
                self.approvals.add(action, lasting=decision is Decision.ALWAYS)
            except LocalLLMError as error:
                self.show_error(str(error))
        return decision is not Decision.REFUSE
