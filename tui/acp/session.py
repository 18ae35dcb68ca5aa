"""A conversation of an editor: its prompts, its modes, and the tool calls that the editor shows and approves."""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from acp import Client, schema, update_agent_message_text, update_agent_thought_text
from acp import RequestError as ClientError

from localllm.actions.action import MAX_ROUNDS, Action, ToolError
from localllm.actions.approvals import Decision, rule_for
from localllm.answer.event import AnswerEvent, AnswerStream, PartKind, merged
from localllm.answer.tool_calls import ToolCall
from localllm.background import in_thread
from localllm.chats import Message, Role
from localllm.chats.conversation import Conversation
from localllm.chats.ending import note_end
from localllm.chats.tool_loop import ToolLoop
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError, RequestError
from tui.acp.content import Blocks, call_id, end_of, preview_of, read_prompt, replayed, start_of, title
from tui.acp.files import EditorFiles
from tui.acp.models import SessionLoader
from tui.acp.terminals import EditorTerminals
from tui.answering import make_title, summarise
from tui.backend import LoadedInfo, short_name

POLL_S = 0.05

MODES = (
    schema.SessionMode(id="ask", name="Ask", description="Asks before it changes a file or runs a command"),
    schema.SessionMode(
        id="edit", name="Edit", description="Changes files without asking; asks before it runs a command"
    ),
    schema.SessionMode(id="chat", name="Chat", description="Answers without tools"),
)
COMMANDS = (
    schema.AvailableCommand(name="undo", description="Undo the last change of a file in this folder"),
    schema.AvailableCommand(name="compact", description="Replace the oldest turns by a summary"),
    schema.AvailableCommand(name="continue", description="Go on with an answer that was cut or stopped"),
)
_THINK = {"default": None, "on": True, "off": False}

log = logging.getLogger(__name__)


class EditorSession(ToolLoop):
    """One session, which answers one prompt at a time."""

    def __init__(
        self,
        client: Client,
        models: SessionLoader,
        conversation: Conversation,
        folder: Path,
        servers: Mapping[str, Mapping[str, Any]],
        of_editor: schema.ClientCapabilities,
    ) -> None:
        """of_editor: what the editor does for files and commands."""
        stopping = threading.Event()
        identity = str(conversation.session_id)
        files = EditorFiles(client, identity, of_editor.fs, stopping) if of_editor.fs else None
        run = EditorTerminals(client, identity, stopping, self._show_terminal).run if of_editor.terminal else None
        super().__init__(conversation, folder, stopping, servers, files, run)
        self._turn = asyncio.Lock()
        self._cancels = 0  # so far
        self._client, self._models = client, models
        self._edits_freely = False
        self._shows_effect = False  # whether the running call shows a file's change or a terminal
        self._title: asyncio.Task[None] | None = None

    @property
    def conversation(self) -> Conversation:
        return self._conversation

    @property
    def id(self) -> str:
        return str(self._conversation.session_id)

    @property
    def busy(self) -> bool:
        return self._turn.locked()

    @property
    def mode(self) -> str:
        """The id of the current mode."""
        if not self._conversation.parameters.tools:
            return "chat"
        return "edit" if self._edits_freely else "ask"

    def set_mode(self, mode: str) -> None:
        """Raises RequestError if there is no such mode."""
        _require(mode, [each.id for each in MODES], "mode")
        self._edits_freely = mode == "edit"
        self._conversation.set_parameters(replace(self._conversation.parameters, tools=mode != "chat"))

    def set_thinking(self, value: str) -> None:
        """Raises RequestError if the value is unknown."""
        _require(value, list(_THINK), "value")
        self._conversation.set_parameters(replace(self._conversation.parameters, think=_THINK[value]))

    @property
    def thinking(self) -> str:
        return next(name for name, value in _THINK.items() if value is self._conversation.parameters.think)

    async def show_commands(self) -> None:
        await self._tell(
            schema.AvailableCommandsUpdate(
                session_update="available_commands_update", available_commands=list(COMMANDS)
            )
        )

    async def replay(self) -> None:
        """Show the stored conversation."""
        for update in replayed(self._conversation.messages, self.folder):
            await self._tell(update)

    async def prompt(self, blocks: Blocks) -> schema.StopReason:
        """Answer a prompt, or run a command, once the prompts before it are answered. Raises LocalLLMError."""
        cancels = self._cancels
        async with self._turn:
            if self._cancels != cancels:
                return "cancelled"
            self.stopping.clear()
            try:
                return await self._prompt(blocks)
            finally:
                self.stopping.set()  # what runs in threads ends too, if the client has left

    def cancel(self) -> None:
        """End the answer that runs, and the prompts that wait."""
        self._cancels += 1
        self.stopping.set()

    def close(self) -> None:
        self.cancel()
        if self._title:
            self._title.cancel()
        super().close()

    async def _prompt(self, blocks: Blocks) -> schema.StopReason:
        if self._title:
            self._title.cancel()
        text, files = await in_thread(lambda: read_prompt(blocks, self.folder, self._models.backend))
        messages = self._conversation.messages
        partial = None
        match text:
            case "/undo":
                undone = await self.undo()
                await self.show_note(f"Undone:\n\n```diff\n{undone}\n```" if undone else "Nothing was undone.")
                return "end_turn"
            case "/compact":
                return await self._compact()
            case "/continue":
                if not messages or messages[-1].role is Role.USER:
                    raise RequestError("There is no answer to continue.")
                partial = messages[-1] if messages[-1].role is Role.ASSISTANT else None
            case _:
                self._conversation.ask(text, files)
        last = await self.run(self._write, partial)
        if self.stopping.is_set():
            return "cancelled"
        if last is None:
            return "max_turn_requests" if self.rounds >= MAX_ROUNDS else "end_turn"
        if last.finish_reason == FinishReason.ERROR:
            raise LocalLLMError(last.error or "The answer ended with an error.")
        if last.finish_reason == FinishReason.STOP:
            self._title = asyncio.create_task(self._make_title())
        return "max_tokens" if last.finish_reason == FinishReason.LENGTH else "end_turn"

    async def _compact(self) -> schema.StopReason:
        info = await self._models.loaded(self.stopping)
        if not await summarise(self._conversation, self._models.backend, info.sees, self.stopping):
            return "cancelled"
        await self.show_note("From now on the model gets a summary in place of the oldest turns.")
        return "end_turn"

    async def _make_title(self) -> None:
        info = self._models.backend.info
        if info is None or not (info.converses and info.titles):
            return
        try:
            await make_title(self._conversation, self._models.backend)
            await self._tell(
                schema.SessionInfoUpdate(session_update="session_info_update", title=self._conversation.title)
            )
        except (LocalLLMError, ConnectionError) as error:
            log.warning("There is no title: %s", error)

    async def _write(self, continues: bool, tool_choice: str | None) -> Message | None:
        """Have the model answer once, or continue the last answer; sends it as it comes, and saves it."""
        conversation, backend = self._conversation, self._models.backend
        message = conversation.messages[-1] if continues else conversation.begin_answer()
        before, message.finish_reason = dict(message.stats), None
        answer: AnswerStream | None = None
        try:
            info = await self._models.loaded(self.stopping)
            request = conversation.request(continues, info.sees, await self._offered(info), tool_choice)
            answer = await in_thread(lambda: backend.submit(request))
            last = await self._follow(answer, message)
            unseen = () if info.sees else conversation.picture_names
            note_end(message, last, unseen, before, conversation.asked_pictures)
            if info.context:
                used = message.stats["prompt"] + message.stats["generated"]
                await self._tell(schema.UsageUpdate(session_update="usage_update", used=used, size=info.context))
        except LocalLLMError as error:
            if not self.stopping.is_set():
                message.error, message.finish_reason = str(error), FinishReason.ERROR
        finally:
            if answer:
                answer.cancel()
            message.finish_reason = message.finish_reason or FinishReason.CANCELLED
            conversation.save(message)
        return message

    async def _offered(self, info: LoadedInfo) -> list[dict[str, Any]]:
        """The tools for the model; says which MCP servers did not start, once."""
        tools = await self.offered(short_name(info.name), info.converses)
        problems, self.problems = self.problems, []
        for problem in problems:
            await self.show_note(problem)
        return tools

    async def _follow(self, answer: AnswerStream, message: Message) -> AnswerEvent:
        """Send an answer until it ends; returns the last event."""
        while True:
            if self.stopping.is_set():
                answer.cancel()
            if events := answer.poll():
                event = merged(events)
                for part in event.parts:
                    if text := message.add(part):
                        await self._tell(update_agent_message_text(text))
                    elif part.kind is PartKind.REASONING and part.text:
                        await self._tell(update_agent_thought_text(part.text))
                if event.finish_reason is not None:
                    return event
            await asyncio.sleep(POLL_S)

    async def _tell(self, update: Any) -> None:
        await self._client.session_update(session_id=self.id, update=update)

    # What ToolLoop asks and shows.

    def allows(self, action: Action) -> bool:
        """In the mode "edit", changes of files that are not hidden need no question."""
        freely = self._edits_freely and action.tool == "edit_file" and action.pattern is not None
        return freely or super().allows(action)

    async def ask(self, call: ToolCall | None, action: Action) -> Decision:
        options = [schema.PermissionOption(option_id=Decision.ONCE, name="Allow once", kind="allow_once")]
        if call and (rule := rule_for(action)):
            options += [
                schema.PermissionOption(option_id=kind, name=f"{where}: {rule}", kind="allow_always")
                for kind, where in ((Decision.CHAT, "Allow in this chat"), (Decision.ALWAYS, "Always in this folder"))
            ]
        options.append(schema.PermissionOption(option_id=Decision.REFUSE, name="Refuse", kind="reject_once"))
        shown = schema.ToolCallUpdate(
            tool_call_id=self._call_id if call else "undo",
            title=title(call) if call else f"undo the change of {action.subject}, made in another chat",
            kind="edit" if action.change else None,
            status="pending",
            content=preview_of(action),
            raw_input=call.arguments if call else None,
        )
        self._shows_effect = action.change is not None
        asked = asyncio.ensure_future(
            self._client.request_permission(session_id=self.id, tool_call=shown, options=options)
        )
        try:
            while not asked.done() and not self.stopping.is_set():
                await asyncio.wait([asked], timeout=POLL_S)
            if not asked.done():
                return Decision.REFUSE
            outcome = asked.result().outcome
            chosen = outcome.option_id if isinstance(outcome, schema.AllowedOutcome) else Decision.REFUSE
            return Decision(chosen) if chosen in set(Decision) else Decision.REFUSE
        except ClientError as error:
            raise ToolError(f"The editor could not ask the user: {error}") from error
        finally:
            asked.cancel()

    async def show_call(self, call: ToolCall) -> None:
        self._shows_effect = False
        await self._tell(start_of(self._call_id, call, self.folder))

    async def show_running(self, call: ToolCall, action: Action) -> None:
        self._shows_effect = action.change is not None
        content = preview_of(action) if self._shows_effect else None
        await self._tell(
            schema.ToolCallProgress(
                session_update="tool_call_update", tool_call_id=self._call_id, status="in_progress", content=content
            )
        )

    async def _show_terminal(self, terminal: str) -> None:
        self._shows_effect = True
        await self._tell(
            schema.ToolCallProgress(
                session_update="tool_call_update",
                tool_call_id=self._call_id,
                content=[schema.TerminalToolCallContent(type="terminal", terminal_id=terminal)],
            )
        )

    async def add_result(self, call: ToolCall, result: str) -> None:
        message = self._conversation.add_result(call, result)
        identity = call_id(len(self._conversation.messages) - 1)
        await self._tell(end_of(identity, message, shows_text=message.is_failure or not self._shows_effect))

    async def show_note(self, text: str) -> None:
        await self._tell(update_agent_message_text(f"{text}\n\n"))

    def show_error(self, text: str) -> None:
        log.error(text)

    @property
    def _call_id(self) -> str:
        """The running call's name: the place that its result will have."""
        return call_id(len(self._conversation.messages))


def _require(value: str, known: Sequence[str], what: str) -> None:
    if value not in known:
        raise RequestError(f"There is no {what} {value[:64]!r}. Choose one of: {', '.join(known)}.")
