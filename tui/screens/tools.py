"""The chat's front end for tools: the approval dialog, the status line and the messages."""

import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from localllm.actions.action import MAX_ROUNDS, Action
from localllm.actions.approvals import Decision
from localllm.answer.tool_calls import ToolCall
from localllm.chats import Message
from localllm.chats.tool_loop import ToolLoop, refusal
from localllm.errors import LocalLLMError
from localllm.text import shortened
from tui.screens.approval import ApprovalScreen
from tui.screens.chat_view import ChatView
from tui.widgets.frame import Note
from tui.widgets.messages import AnswerView


class ChatTools(ToolLoop):
    """The tools of the current folder. Call methods that ask the user from a worker."""

    def __init__(self, chat: ChatView) -> None:
        super().__init__(chat.conversation, _current_folder(), chat.stopping)
        self._chat = chat

    async def answer(
        self, write: Callable[[AnswerView | None, str | None], Awaitable[Message | None]], view: AnswerView | None
    ) -> Message | None:
        """ToolLoop.run with `write`; errors are shown. view: an answer to continue."""
        try:
            partial = None if view is None else view.message
            return await self.run(lambda continues, choice: write(view if continues else None, choice), partial)
        except LocalLLMError as error:
            self.show_error(str(error))
            return None
        finally:
            self._show_tool("")

    async def ask(self, call: ToolCall | None, action: Action) -> Decision:
        chat = self._chat
        stop = self.stopping if chat.busy else threading.Event()
        chat.asking = True
        try:
            screen = ApprovalScreen(action, stop, chat.prompt.insert, of_model=call is not None)
            decision, reason = await chat.app.push_screen_wait(screen, mode=chat.mode)
        finally:
            chat.asking = False
        if reason:
            raise refusal(reason)
        return decision

    async def run_command(self, command: str) -> str | None:
        self._show_tool(f"running {shortened(command, 32)}, Esc stops")
        try:
            return await super().run_command(command)
        finally:
            self._show_tool("")

    async def show_call(self, call: ToolCall) -> None:
        self._show_tool(f"{call.name[:32]}, round {self.rounds} of {MAX_ROUNDS}")

    async def show_running(self, call: ToolCall, action: Action) -> None:
        """Nothing to change."""

    async def add_result(self, call: ToolCall, result: str) -> None:
        await self._chat.transcript.append(self._conversation.add_result(call, result))
        self._show_tool("")

    async def show_note(self, text: str) -> None:
        await self._chat.transcript.note(Note(text))

    def show_error(self, text: str) -> None:
        self._chat.show_error(text)

    def _show_tool(self, text: str) -> None:
        self._chat.status_line.facts.tool = text
        self._chat.status_line.redraw()


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed; the chat still works, and tools report the missing folder
        return Path(os.environ.get("PWD", os.sep))
