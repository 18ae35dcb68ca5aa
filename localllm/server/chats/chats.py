"""The stored chats of one user, and the answers that are being written to them.

An answer belongs to the server, not to the connection that asked for it: it goes on when the page is closed or loaded
again, and any number of pages may follow it. Everything runs on the event loop, except the store, which has a thread.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from anyio import to_thread

from localllm.actions.action import Action
from localllm.actions.approvals import Decision, question_of, rule_for
from localllm.answer.event import AnswerEvent, AnswerStream
from localllm.answer.tool_calls import ToolCall
from localllm.background import in_thread
from localllm.chats import Message, SessionStore
from localllm.chats.conversation import Conversation
from localllm.chats.database import SessionError
from localllm.chats.ending import note_end
from localllm.chats.parameters import Parameters
from localllm.chats.tool_loop import ToolLoop, refusal
from localllm.engine.request import FinishReason, SamplingParams
from localllm.errors import LocalLLMError
from localllm.files import user_path
from localllm.library.names import BUILT_IN
from localllm.server.chats.markdown import Blocks
from localllm.server.errors import ApiError, message_of
from localllm.server.load_watch import LoadState
from localllm.server.service import RunningAnswers, Service
from localllm.server.streams import defect
from localllm.server.wire import prompt_progress
from localllm.settings import Settings
from localllm.text import harmless

log = logging.getLogger(__name__)

SAVE_EVERY_S = 0.25
LOOK_EVERY_S = 2.0  # whether another program, such as the terminal chat, has changed a chat
# Between two renderings of an answer. Within these limits, rendering takes at most this share of a core, because the
# same cores compute the answer.
DRAW_S = (0.1, 0.5)
DRAW_SHARE = 0.1

T = TypeVar("T")
Row = dict[str, Any]


@dataclass(eq=False, slots=True)
class Running:
    """An answer that is being written, with the calls of tools within it. state: what it is doing, for the page.

    message: the one that grows; None before the first. blocks: its content as HTML. stream: None until the model has
    accepted the request. news: set when there is something new to render. asking: the question that waits for the
    user, and where the decision and the reason of a refusal go.
    """

    conversation: Conversation
    namespace: str
    stopping: threading.Event = field(default_factory=threading.Event)
    message: Message | None = None
    blocks: Blocks = field(default_factory=Blocks)
    state: Row = field(default_factory=lambda: {"phase": "waiting"})
    stream: AnswerStream | None = None
    task: "asyncio.Task[None] | None" = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    asking: "tuple[Action, asyncio.Future[tuple[Decision, str]]] | None" = None

    def stop(self) -> None:
        """End the answer; what it has so far is kept."""
        self.stopping.set()
        if self.asking is not None:
            self.decide(Decision.REFUSE)
        elif self.stream is not None:
            self.stream.cancel()
        elif self.task is not None and (self.message is None or self.message.finish_reason is None):
            self.task.cancel()
        # Otherwise a tool runs, which `stopping` ends.

    def decide(self, decision: Decision, reason: str = "") -> bool:
        """The user's decision about the call that waits for it; False if none does."""
        asking, self.asking = self.asking, None
        if asking is None or asking[1].done():
            return False
        asking[1].set_result((decision, reason))
        return True


class PageTools(ToolLoop):
    """The tools of one chat on the page. The server's folder and rules are those of the terminal chat there.

    seen: the diff of another chat's change that the user has agreed to undo.
    """

    def __init__(self, chats: "Chats", conversation: Conversation, folder: Path) -> None:
        super().__init__(conversation, folder, threading.Event())
        self._chats = chats
        self.seen = ""
        self.unseen = ""  # the diff that an undo needs the user to see first

    def of(self, conversation: Conversation, stopping: threading.Event) -> Self:
        """These tools for the chat as it is now."""
        self._conversation, self.stopping = conversation, stopping
        return self

    async def ask(self, call: ToolCall | None, action: Action) -> Decision:
        if call is None:
            self.unseen = harmless(action.preview)
            return Decision.ONCE if self.seen == self.unseen else Decision.REFUSE
        running = self._running
        decided: asyncio.Future[tuple[Decision, str]] = asyncio.get_running_loop().create_future()
        running.asking = action, decided
        question = {
            "phase": "asking",
            "question": question_of(action),
            "preview": harmless(action.preview),
            "changes": action.change is not None,
            "rule": None if (rule := rule_for(action)) is None else harmless(rule),
            "folder": str(self.folder.root),
        }
        self._chats.tell(running, question)
        decision, reason = await decided
        self._chats.tell(running, {"phase": "waiting"})
        if reason:
            raise refusal(reason)
        return decision

    async def show_call(self, call: ToolCall) -> None:
        """Nothing to show yet."""

    async def show_running(self, call: ToolCall, action: Action) -> None:
        self._chats.tell(
            self._running, {"phase": "calling", "tool": call.name, "subject": harmless(action.subject[:200])}
        )

    async def add_result(self, call: ToolCall, result: str) -> None:
        message = await self._chats.work(lambda _: self._conversation.add_result(call, result))
        self._chats.changed(message.session_id)

    async def show_note(self, text: str) -> None:
        self.show_error(text)

    def show_error(self, text: str) -> None:
        self._chats.note(self._conversation, text)

    @property
    def _running(self) -> Running:
        running = self._chats.running(self._conversation.session_id or 0)
        assert running is not None
        return running


class Chats:
    """For the event loop. Methods raise SessionError, and ApiError 404 for an unknown chat or message."""

    def __init__(self, file: Path, service: Service, is_own: bool) -> None:
        """is_own: whether the user is the one who runs the server, whose prompts and personas these are."""
        self.is_own = is_own
        folder = service.options.settings.page_tools
        self._folder = None if folder is None else user_path(folder)
        self._tools: dict[int, PageTools] = {}
        self._notes: dict[int, str] = {}
        self._file = file
        self._service = service
        self._thread = ThreadPoolExecutor(1, "chats")
        self._store: SessionStore | None = None
        self._running: dict[int, Running] = {}
        self._titles: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.Event] = set()
        self._versions = Counter[int]()  # of each chat, 0 is that of the list
        self._look: asyncio.Task[None] | None = None
        self._closed = False
        self.one_change = asyncio.Lock()  # held from reading a chat until its answer has begun

    async def work(self, do: Callable[[SessionStore], T]) -> T:
        """Do something with the store, on its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, do)

    def _do(self, do: Callable[[SessionStore], T]) -> T:
        if self._store is None:
            self._store = SessionStore(self._file, must_save=False)
        return do(self._store)

    async def open(self, chat: int) -> Conversation:
        """A stored chat as it is now."""

        def model_of(store: SessionStore) -> str:
            if not store.knows(chat):
                raise ApiError(404, "there is no such chat")
            return store.summary(chat).model

        model = await self.work(model_of)
        defaults = await self.defaults(model)

        def read(store: SessionStore) -> Conversation:
            conversation = Conversation(store, model, defaults)
            conversation.open(chat)
            return conversation

        return await self.work(read)

    async def new(self, model: str) -> Conversation:
        """A chat that is stored with its first message. Raises what Service.find raises."""
        await self._service.find(model)
        defaults = await self.defaults(model)
        return await self.work(lambda store: Conversation(store, model, defaults))

    async def defaults(self, model: str) -> Parameters:
        """The parameters of a chat with this model that has none of its own."""
        settings = self._service.options.settings
        with contextlib.suppress(LocalLLMError, OSError):  # an answer reports why the model cannot be used
            _, entry = await self._service.find(model)
            own = getattr(getattr(entry, "behaviour", None), "settings", {})
            usual = Settings()
            unset = {name: value for name, value in own.items() if getattr(settings, name) == getattr(usual, name)}
            settings = replace(settings, **unset)
        return Parameters.from_settings(settings)

    def running(self, chat: int) -> Running | None:
        """The answer that is being written to a chat."""
        return self._running.get(chat)

    @property
    def answering(self) -> Sequence[int]:
        """The chats to which answers are being written."""
        return list(self._running)

    def check_idle(self, chat: int | None) -> None:
        """Raise ApiError 409 while an answer is being written to a chat."""
        if chat in self._running:
            raise ApiError(409, "an answer is still being written to this chat; stop it first")

    def begin(self, conversation: Conversation, namespace: str, continues: bool = False) -> None:
        """Have the model answer the conversation, or continue its last answer."""
        chat = conversation.session_id
        assert chat is not None
        self.check_idle(chat)
        running = self._running[chat] = Running(conversation, namespace)
        running.task = asyncio.create_task(self._answer(chat, running, continues))

    @property
    def folder(self) -> Path | None:
        """Where tools may be used; None for nowhere."""
        return self._folder

    def check_own(self) -> None:
        """Raise ApiError 403 for a user who has no saved prompts and personas here."""
        if not self.is_own:
            raise ApiError(403, "saved prompts and personas are those of the user who runs the server")

    def check_tools(self) -> Path:
        """The folder for tools. Raises ApiError 403 if there is none."""
        if self._folder is None:
            raise ApiError(403, "tools are not allowed here; `localllm serve --page-tools FOLDER` allows them")
        return self._folder

    def tools(self, conversation: Conversation) -> PageTools:
        """The tools of a stored chat. Raises ApiError 403 if the page has none."""
        folder, chat = self.check_tools(), conversation.session_id
        assert chat is not None
        if chat not in self._tools:
            self._tools[chat] = PageTools(self, conversation, folder)
        return self._tools[chat]

    def note(self, conversation: Conversation, text: str) -> None:
        """Show the user something that is not part of the chat, until the next answer."""
        assert conversation.session_id is not None
        self._notes[conversation.session_id] = text
        self.changed(conversation.session_id)

    def note_of(self, chat: int) -> str:
        """What `note` shows; "" for nothing."""
        return self._notes.get(chat, "")

    def changed(self, chat: int) -> None:
        """A chat has changed: pages that show it, or the list, read it again."""
        self._versions[chat] += 1
        self._versions[0] += 1
        self._notify()

    async def events(self, chat: int | None) -> AsyncGenerator[Row, None]:
        """What changes, from now on: versions of the list and of a chat, and its answer as it is written.

        A reader who is slow gets the newest state, not every step. Ends when the server stops.
        """
        news = asyncio.Event()
        self._watchers.add(news)
        if self._look is None:
            self._look = asyncio.create_task(self._look_for_changes())
        sent: dict[str, int] = {}
        shown = _Shown()
        try:
            while not self._closed:
                news.clear()
                versions = {"list": self._versions[0]} | ({} if chat is None else {"chat": self._versions[chat]})
                if versions != sent:
                    yield versions
                    sent = versions
                if chat is not None and (running := self._running.get(chat)) and (line := shown.news(running)):
                    yield {"answer": line}
                await news.wait()
        finally:
            self._watchers.discard(news)
            if not self._watchers and self._look is not None:
                self._look.cancel()
                self._look = None

    def leave(self) -> None:
        """The server stops: end the answers and the streams of events."""
        self._closed = True
        for running in list(self._running.values()):
            running.stop()
        for task in self._titles:
            task.cancel()
        self._notify()

    async def close(self) -> None:
        """Wait until all is saved. Idempotent."""
        self.leave()
        tasks = [*(running.task for running in self._running.values() if running.task), *self._titles]
        await asyncio.gather(*tasks, return_exceptions=True)
        for tools in self._tools.values():
            await in_thread(tools.close)
        if self._store is not None:
            await self.work(SessionStore.close)
            self._store = None
        self._thread.shutdown()

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    async def _look_for_changes(self) -> None:
        """Tell the pages when another program has changed the chats."""
        known: int | None = None
        while True:
            with contextlib.suppress(SessionError):  # what the page asks for next says it
                found = await self.work(SessionStore.foreign_changes)
                if known is not None and found != known:
                    for chat in list(self._versions) or [0]:
                        self._versions[chat] += 1
                    self._versions[0] += 1
                    self._notify()
                known = found
            await asyncio.sleep(LOOK_EVERY_S)

    async def _answer(self, chat: int, running: Running, continues: bool) -> None:
        conversation = running.conversation
        self._notes.pop(chat, None)
        last: Message | None = None
        try:
            if self.folder is None or not conversation.parameters.tools:
                last = await self._write(running, continues)
            else:
                tools = self.tools(conversation).of(conversation, running.stopping)
                await self._close_others(tools)
                begun = conversation.messages[-1] if continues else None
                last = await tools.run(partial(self._write, running, tools=tools), begun)
        except LocalLLMError as error:
            self.note(conversation, message_of(error))
        finally:
            del self._running[chat]
            self.changed(chat)
        if last is not None and last.finish_reason == FinishReason.STOP and not self._closed:
            task = asyncio.create_task(self._make_title(chat, running))
            self._titles.add(task)
            task.add_done_callback(self._titles.discard)

    async def _close_others(self, tools: PageTools) -> None:
        """End the MCP servers of chats to which no answer is being written."""
        for chat, other in self._tools.items():
            if other is not tools and chat not in self._running:
                await in_thread(other.close)

    async def _write(
        self, running: Running, continues: bool, tool_choice: str | None = None, tools: PageTools | None = None
    ) -> Message:
        """Have the model answer once, or continue the last answer; returns it, saved."""
        conversation, service = running.conversation, self._service
        last = conversation.messages[-1]
        message = last if continues else await self.work(lambda _: conversation.begin_answer())
        before = dict(message.stats) if continues else None
        message.finish_reason = message.error = None
        running.message, running.blocks = message, Blocks()
        self.changed(message.session_id)
        try:
            models, entry = await service.find(conversation.model)
            able = await to_thread.run_sync(models.capabilities, entry)
            sees = not {"vision", "audio"}.isdisjoint(able)
            offered = await tools.offered(conversation.model, "tools" in able) if tools else ()
            if tools and tools.problems:
                self.note(conversation, "\n".join(tools.problems))
            request = conversation.request(continues, sees, offered, tool_choice)
            # A value of the user's counts even if it is our default: the model's own default may be another.
            own, usual = conversation.parameters.sampling(), conversation.defaults.sampling()
            chosen = {name: getattr(own, name) for name in _differing(own, usual)}
            request = replace(request, sampling={**request.sampling, **chosen}, namespace=running.namespace)

            def listen(state: LoadState) -> None:
                self.tell(running, {"phase": "loading", "what": state.phase, "share": round(state.share, 2)})

            async with service.run(conversation.model, [request], listener=listen) as run:
                message.model = run.lease.name
                unseen = () if sees else conversation.picture_names
                note_end(message, await self._follow(running, run), unseen, before, conversation.asked_pictures)
        except asyncio.CancelledError:
            if not running.stopping.is_set():
                raise
            assert running.task
            running.task.uncancel()
        except LocalLLMError as error:
            message.error, message.finish_reason = message_of(error), FinishReason.ERROR
        except Exception as error:
            log.exception("an answer ended with %r", error)
            message.error, message.finish_reason = defect(error), FinishReason.ERROR
        finally:
            running.stream = None
            message.finish_reason = message.finish_reason or FinishReason.CANCELLED
            await self.work(lambda _: conversation.save(message))
        return message

    async def _follow(self, running: Running, run: RunningAnswers) -> AnswerEvent:
        """Take an answer's events until it ends; returns the last one."""
        message, stream, meter = running.message, run.streams[0], run.meters[0]
        assert message is not None
        running.stream = stream
        if running.stopping.is_set():
            stream.cancel()
        drawing = asyncio.create_task(self._draw(running, message))
        last = AnswerEvent()
        try:
            async with contextlib.aclosing(stream.__aiter__()) as events:
                async for event in events:
                    meter.add(event)
                    for part in event.parts:
                        message.add(part)
                    running.state = _state(event)
                    running.news.set()
                    last = event
        finally:
            drawing.cancel()
            await asyncio.wait([drawing])
        return last

    async def _draw(self, running: Running, message: Message) -> None:
        """Render and save an answer while it is written."""
        saved = time.monotonic()
        while True:
            await running.news.wait()
            running.news.clear()
            spent = await to_thread.run_sync(_render, running.blocks, message)
            self._notify()
            if time.monotonic() - saved > SAVE_EVERY_S:
                with contextlib.suppress(SessionError):  # the last save reports it
                    await self.work(lambda _: running.conversation.save(message, lasting=False))
                saved = time.monotonic()
            await asyncio.sleep(min(max(spent / DRAW_SHARE, DRAW_S[0]), DRAW_S[1]))

    def tell(self, running: Running, state: Row) -> None:
        """Show what an answer is doing."""
        running.state = state
        self._notify()

    async def _make_title(self, chat: int, running: Running) -> None:
        """Have the model name a chat in the background; if that fails, it keeps the start of the first prompt."""
        conversation = running.conversation
        try:
            request = await self.work(lambda _: conversation.title_request())
            if request is None or conversation.model == BUILT_IN:
                return
            request = replace(request, namespace=running.namespace)
            async with self._service.run(conversation.model, [request]) as run:
                if getattr(run.lease.model.template, "is_default", False):
                    return
                await run.finish()
                whole = run.answers[0]
            if whole.last.finish_reason is FinishReason.STOP:
                await self.work(lambda _: conversation.take_title(chat, whole.content))
                self.changed(chat)
        except LocalLLMError as error:
            log.info("a chat keeps its first words as title: %s", error)


class _Shown:
    """What one reader of a chat's events has got of the answer."""

    def __init__(self) -> None:
        self._message = 0
        self._blocks: list[str] = []
        self._reasoning = 0
        self._state: Row = {}

    def news(self, running: Running) -> Row | None:
        """What the reader has not got yet: blocks from a place on, reasoning from a place on, the state."""
        message = running.message
        if message is None:
            return None
        if message.id != self._message:
            self._message, self._blocks, self._reasoning, self._state = message.id, [], 0, {}
        now, was = running.blocks.html, self._blocks
        pairs = enumerate(zip(was, now, strict=False))
        same = next((place for place, (old, new) in pairs if old != new), min(len(was), len(now)))
        reasoning, at = message.reasoning, self._reasoning
        if same == len(now) == len(was) and len(reasoning) == at and running.state == self._state:
            return None
        self._blocks, self._reasoning, self._state = list(now), len(reasoning), running.state
        return {
            "message": message.id,
            "from": same,
            "blocks": now[same:],
            "reasoning_from": at,
            "reasoning": reasoning[at:],
            "state": running.state,
        }


def _render(blocks: Blocks, message: Message) -> float:
    """Render what an answer has so far; returns the processor seconds that it took."""
    began = time.thread_time()
    blocks.update(message.content)
    return time.thread_time() - began


def _state(event: AnswerEvent) -> Row:
    """What an answer is doing."""
    if event.progress is not None:
        return {"phase": "reading", **prompt_progress(event.progress)}
    counts, timings = event.counts, event.timings
    decoded = counts.generated - 1
    speed = decoded / timings.decode_s if decoded > 0 and timings.decode_s > 0 else 0.0
    return {
        "phase": "writing",
        "prompt": counts.prompt,
        "cached": counts.cached,
        "generated": counts.generated,
        "speed": round(speed, 2),
        "ttft_s": round(timings.ttft_s, 3),
    }


def _differing(first: SamplingParams, second: SamplingParams) -> list[str]:
    return [one.name for one in fields(first) if getattr(first, one.name) != getattr(second, one.name)]
