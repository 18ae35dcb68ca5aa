"""The conversation behind the chat screen: messages, variants, requests to the model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from localllm.answer.event import function_object
from localllm.answer.request import AnswerRequest, changed
from localllm.answer.tool_calls import ToolCall
from localllm.chats import Attachment, Message, Role, SessionStore
from localllm.chats.parameters import NAMES, Parameters
from localllm.engine.request import ContextPolicy, FinishReason
from localllm.errors import RequestError
from localllm.quoting.excerpt import INSTRUCTION
from localllm.quoting.quotations import QuotationChecker, QuotedSource
from localllm.text import harmless

if TYPE_CHECKING:
    from localllm.library.modelfile import Modelfile

TITLE_PROMPT = "Name the subject of our conversation in at most five words. Answer with the words alone."
TITLE_TOKENS = 24
MOST_TITLE_WORDS = 8  # the prompt asks for five
TITLE_INPUT_CHARS = 2000  # of each message, in a title request
SUMMARY_PROMPT = (
    "Summarise our conversation so far for yourself: what I want, what was decided, names, numbers, code and open "
    "questions that we will need. Write notes of at most 250 words, and nothing else."
)
SUMMARY_HEADING = "Notes on the earlier part of this conversation:"
SUMMARY_TOKENS = 600
KEPT_TURNS = 2  # the last questions and answers are never summarised
NOT_RUN = "Error: this call was not carried out."


class Conversation:
    """A session; every change is saved in the store, starting with the first message."""

    def __init__(self, store: SessionStore, model: str, parameters: Parameters) -> None:
        self.store = store
        self.model = model
        self.parameters = self.defaults = parameters
        self.session_id: int | None = None
        self.messages: list[Message] = []

    @property
    def title(self) -> str:
        """The session's title; "New chat" if it is not stored yet."""
        return "New chat" if self.session_id is None else self.store.summary(self.session_id).title

    @property
    def tags(self) -> tuple[str, ...]:
        return () if self.session_id is None else self.store.summary(self.session_id).tags

    @property
    def is_deleted(self) -> bool:
        return self.session_id is not None and self.store.summary(self.session_id).deleted

    def open(self, session_id: int) -> None:
        """Show a stored session with its own parameters."""
        summary = self.store.summary(session_id)
        self._read(session_id)
        self.parameters = Parameters.from_stored(summary.parameters, self.defaults)

    def clear(self) -> None:
        """Start a new session with the same parameters. The old one stays stored."""
        self.session_id = None
        self.messages = []

    def set_parameters(self, parameters: Parameters) -> None:
        """Change the parameters of the next answers."""
        self.parameters = parameters
        self._store_parameters()

    def set_defaults(self, defaults: Parameters) -> None:
        """Set a model's defaults; parameters that the user has changed keep their values."""
        self.parameters = self.parameters.rebased(self.defaults, defaults)
        self.defaults = defaults

    def set_model(self, model: str) -> None:
        """Change the model of the next answers."""
        self.model = model
        self._store_parameters()

    def ask(self, content: str, attachments: tuple[Attachment, ...] = ()) -> Message:
        return self._append(Role.USER, content, attachments)

    def begin_answer(self) -> Message:
        """Append an empty answer that the caller fills and saves."""
        return self._append(Role.ASSISTANT)

    def add_result(self, call: ToolCall, result: str) -> Message:
        """Append the result of a tool call."""
        return self._append(Role.TOOL, result, calls=(call,))

    def unanswered_calls(self, message: Message) -> tuple[ToolCall, ...]:
        """The calls of an answer that have no result yet."""
        following = self.messages[self._index(message) + 1 :]
        results = next((n for n, one in enumerate(following) if one.role is not Role.TOOL), len(following))
        return message.calls[results:]

    @property
    def has_excerpts(self) -> bool:
        """Whether any attachment is an excerpt of a document."""
        return any(file.line for message in self.messages for file in message.attachments)

    def checker(self, message: Message) -> QuotationChecker | None:
        """A checker of an answer's quotations against the files before it; None if no file is a document excerpt."""
        earlier = takewhile(lambda one: one.id != message.id, self.messages)
        files = [file for one in earlier for file in one.attachments if not file.picture]
        if not any(file.line for file in files):
            return None
        return QuotationChecker([QuotedSource(file.as_excerpt()) for file in files], cite=_cite)

    def checked(self, message: Message) -> str:
        """A message's text; in an answer, quotations are followed by their sources."""
        checker = self.checker(message) if message.role is Role.ASSISTANT else None
        return checker.push(message.content) + checker.flush() if checker else message.content

    def edit(self, message: Message, content: str, attachments: tuple[Attachment, ...] = ()) -> Message:
        """Replace a user message and all that follow; the old path stays as a variant."""
        self.cut_before(message)
        return self._append(Role.USER, content, attachments)

    def cut_before(self, message: Message) -> None:
        """Remove a message and all that follow from the path; the next message appended becomes a variant of it."""
        del self.messages[self._index(message) :]
        self.store.cut(message.session_id, message.parent_id)

    def save(self, message: Message, lasting: bool = True) -> None:
        """Store a message. lasting: as in SessionStore.update."""
        self.store.update(message, lasting)

    def reread_if_changed(self, message: Message) -> bool:
        """Read the session again if another program has changed a message; False if it has not."""
        if not self.store.has_changed(message):
            return False
        self._read(message.session_id)
        return True

    def variant(self, message: Message) -> tuple[int, int]:
        """A message's 1-based position among its variants, and their count."""
        variants = self.store.variants(message)
        return variants.index(message.id) + 1, len(variants)

    def turn_to_variant(self, message: Message, step: int) -> bool:
        """Show the next (1) or previous (-1) variant of a message; False if there is none."""
        variants = self.store.variants(message)
        index = variants.index(message.id) + step
        if not 0 <= index < len(variants):
            return False
        self.store.select(message.session_id, variants[index])
        self._read(message.session_id)
        return True

    def fork(self, message: Message) -> None:
        """Continue in a copy of the session that ends with this message."""
        self._read(self.store.fork(message.session_id, message.id))

    @property
    def asked_pictures(self) -> int:
        """How many pictures came with the last question."""
        asked = next((message for message in reversed(self.messages) if message.role is Role.USER), None)
        return len(asked.picture_names) if asked else 0

    @property
    def picture_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for message in self.messages for name in message.picture_names))

    def request(
        self,
        continues: bool = False,
        sees: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | None = None,
    ) -> AnswerRequest:
        """The request for the last message's answer.

        continues: it continues a partial answer; otherwise the last message is empty and not sent. sees: whether the
        model reads pictures; if not, their names are sent instead. tools, tool_choice: as in AnswerRequest.
        """
        shown = self.messages if continues else self.messages[:-1]
        return self._request(shown, sees, tools, tool_choice)

    def draft_request(
        self, draft: Message | None, replaced: Message | None, sees: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> AnswerRequest:
        """The request that would be sent for a draft, or for another answer if there is none; nothing is stored.

        replaced: the message from which on the path would be cut first. sees, tools: as for `request`.
        """
        shown = self.messages[: None if replaced is None else self._index(replaced)]
        return self._request(shown if draft is None else [*shown, draft], sees, tools)

    def _request(
        self,
        shown: Sequence[Message],
        sees: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | None = None,
    ) -> AnswerRequest:
        messages: list[dict[str, Any]] = []
        summed = max((place for place, message in enumerate(shown, 1) if message.summary), default=0)
        waiting: list[ToolCall] = []  # calls without a result so far
        for message in shown[summed:]:
            if message.role is Role.TOOL:
                del waiting[:1]
            else:
                messages += [_result(call, NOT_RUN) for call in waiting]
                waiting = list(message.calls)
            messages.append(_message(message, sees))
        messages += [_result(call, NOT_RUN) for call in waiting]
        messages = _joined(messages)
        parameters = self.parameters
        system = [parameters.system] if parameters.system else []
        if self.has_excerpts:
            system.append(INSTRUCTION)
        if summed:
            system.append(f"{SUMMARY_HEADING}\n{shown[summed - 1].summary}")
        if system:
            messages.insert(0, {"role": "system", "content": "\n\n".join(system)})
        return AnswerRequest(
            messages=messages,
            continues_text=True,
            think=parameters.think,
            # Only what differs from our defaults, so that a server's own per-model defaults apply.
            sampling=changed(parameters.sampling()),
            max_tokens=parameters.max_tokens,
            context_limit=parameters.ctx,
            image_min_tokens=parameters.image_min_tokens,
            image_max_tokens=parameters.image_max_tokens,
            context_policy=ContextPolicy.DROP_MESSAGES,
            tools=tools,
            tool_choice=tool_choice,
        )

    def compaction(self, sees: bool = True) -> tuple[Message, AnswerRequest]:
        """The last message that a summary can replace, and the request for the summary.

        Summarises all but the last KEPT_TURNS questions and their answers. The request starts like the one for the last
        answer, so its prefix is in the KV cache. Raises RequestError if there is nothing to summarise.
        """
        asked = [place for place, message in enumerate(self.messages) if message.role is Role.USER]
        end = asked[-KEPT_TURNS] if len(asked) > KEPT_TURNS else 0
        if not end or self.messages[end - 1].summary:
            raise RequestError(f"There is nothing to summarise yet: the last {KEPT_TURNS} turns stay as they are.")
        request = self._request(self.messages[:end], sees)
        messages = [*request.messages, {"role": "user", "content": SUMMARY_PROMPT}]
        return self.messages[end - 1], replace(
            request, messages=messages, max_tokens=SUMMARY_TOKENS, think=False, context_policy=ContextPolicy.REFUSE
        )

    def set_summary(self, message: Message, summary: str) -> None:
        """Replace a message and all before it by a summary in requests; "" sends the messages again."""
        message.summary = summary
        self.store.summarise(message)

    def summed(self) -> Message | None:
        """The message whose summary is in use."""
        return next((message for message in reversed(self.messages) if message.summary), None)

    def recipe(self) -> "Modelfile":
        """A recipe for a model that starts with this conversation and its parameters, without pictures."""
        from localllm.library.behaviour import SETTING_OF
        from localllm.library.modelfile import Modelfile

        now, usual = self.parameters, self.defaults
        changed = {
            theirs: getattr(now, ours)
            for theirs, ours in SETTING_OF.items()
            if ours in NAMES and getattr(now, ours) not in (None, getattr(usual, ours))
        }
        messages = [
            {"role": str(message.role), "content": message.for_model()}
            for message in self.messages
            if message.content and message.role is not Role.TOOL
        ]
        return Modelfile(system=now.system or None, parameters=changed, messages=messages)

    def title_request(self) -> AnswerRequest | None:
        """A background request for a title; None if the session has a title or is too short."""
        if self.session_id is None or len(self.messages) < 2 or self.store.summary(self.session_id).titled:
            return None
        said = [{"role": str(one.role), "content": one.content[:TITLE_INPUT_CHARS]} for one in self.messages[:2]]
        return AnswerRequest(
            messages=[*said, {"role": "user", "content": TITLE_PROMPT}],
            max_tokens=TITLE_TOKENS,
            think=False,
            background=True,
        )

    def take_title(self, session_id: int, words: str) -> None:
        """Name a session by a model's answer to `title_request`, unless it has a name or the answer is too long."""
        title = " ".join(harmless(words).split()).strip("\"'*#.")[:60]
        if 0 < len(title.split()) <= MOST_TITLE_WORDS and not self.store.summary(session_id).titled:
            self.store.rename(session_id, title)

    def _index(self, message: Message) -> int:
        return next(place for place, shown in enumerate(self.messages) if shown.id == message.id)

    def _read(self, session_id: int) -> None:
        """Read a session's messages. An unfinished answer counts as cancelled, so that it can be continued."""
        messages = self.store.path(session_id)
        for message in messages:
            if message.role is Role.ASSISTANT and message.finish_reason is None:
                message.finish_reason = FinishReason.CANCELLED
        self.session_id, self.messages = session_id, messages

    def _append(
        self,
        role: Role,
        content: str = "",
        attachments: tuple[Attachment, ...] = (),
        calls: tuple[ToolCall, ...] = (),
    ) -> Message:
        if self.session_id is None:
            self.session_id = self.store.create(self.model, self.parameters.stored())
        parent = self.messages[-1].id if self.messages else None
        model = self.model if role is Role.ASSISTANT else ""
        message = Message(0, self.session_id, parent, role, content, attachments=attachments, model=model, calls=calls)
        self.messages.append(self.store.add(message))
        return message

    def _store_parameters(self) -> None:
        if self.session_id is not None:
            self.store.set_parameters(self.session_id, self.model, self.parameters.stored())


def _cite(place: str) -> str:
    """A citation as Markdown code, because file names may contain Markdown syntax."""
    plain = place.replace("`", "\ufffd")
    return f" [`{plain}`]"


def _result(call: ToolCall, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_name": call.name, "content": text}


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of the user that follow each other become one, because many templates allow only one."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if found and message["role"] == found[-1]["role"] == str(Role.USER):
            found[-1] = {"role": message["role"], "content": _both(found[-1]["content"], message["content"])}
        else:
            found.append(message)
    return found


def _both(first: Any, second: Any) -> Any:
    """Two contents as one: texts, or lists of pictures and texts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in (first, second)]
    return [*parts[0], *parts[1]]


def _message(message: Message, sees: bool) -> dict[str, Any]:
    """A message for the model, pictures before text."""
    if message.role is Role.TOOL:
        return _result(message.calls[0], message.content)
    text = message.for_model(sees)
    pictures = [{"type": "image", "data": data} for data in message.pictures()] if sees else []
    fields: dict[str, Any] = {
        "role": str(message.role),
        "content": [*pictures, {"type": "text", "text": text}] if pictures else text,
    }
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["tool_calls"] = [function_object(call) for call in message.calls]
    return fields
