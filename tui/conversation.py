"""The conversation on the screen: which messages are shown, and what becomes of them. Knows no widget."""

from typing import Any

from localllm.answer.event import function_object
from localllm.answer.request import AnswerRequest, changed
from localllm.engine.request import ContextPolicy, FinishReason
from tui.backend import Recipe
from tui.parameters import NAMES, Parameters
from tui.sessions import Attachment, Message, Role, SessionStore

TITLE_PROMPT = "Name the subject of our conversation in at most five words. Answer with the words alone."
TITLE_TOKENS = 24
# Characters of each message that a title is made of; more would only cost time.
TITLE_INPUT_CHARS = 2000


class Conversation:
    """One session, kept in the store as it changes. A session is stored with its first message."""

    def __init__(self, store: SessionStore, model: str, parameters: Parameters) -> None:
        self.store = store
        self.model = model
        self.parameters = self.defaults = parameters
        self.session_id: int | None = None
        self.messages: list[Message] = []

    @property
    def title(self) -> str:
        """The session's title, or a name for one that is not stored yet."""
        return "New chat" if self.session_id is None else self.store.summary(self.session_id).title

    def open(self, session_id: int) -> None:
        """Show a stored session with its own parameters."""
        summary = self.store.summary(session_id)
        self.session_id = session_id
        self.parameters = Parameters.from_stored(summary.parameters, self.parameters)
        self._read()

    def clear(self) -> None:
        """Begin anew, with the same parameters. What was said stays stored."""
        self.session_id = None
        self.messages = []

    def set_parameters(self, parameters: Parameters) -> None:
        """Answer differently from now on."""
        self.parameters = parameters
        self._store_parameters()

    def set_defaults(self, defaults: Parameters) -> None:
        """Take another model's defaults wherever nothing else was chosen."""
        self.parameters = self.parameters.rebased(self.defaults, defaults)
        self.defaults = defaults

    def set_model(self, model: str) -> None:
        """Let another model answer from now on."""
        self.model = model
        self._store_parameters()

    def ask(self, content: str, attachments: tuple[Attachment, ...] = ()) -> Message:
        """Append what the user says."""
        return self._append(Role.USER, content, attachments)

    def begin_answer(self) -> Message:
        """Append an empty answer, which the caller fills and saves."""
        return self._append(Role.ASSISTANT)

    def edit(self, message: Message, content: str, attachments: tuple[Attachment, ...] = ()) -> Message:
        """Say something else in place of a message of the user's; the old path stays as a variant."""
        self._cut_before(message)
        return self._append(Role.USER, content, attachments)

    def drop_answer(self, message: Message) -> None:
        """Take an answer off the path, so that `begin_answer` makes a variant of it."""
        self._cut_before(message)

    def save(self, message: Message) -> None:
        """Store how far a message has come."""
        self.store.update(message)

    def variant(self, message: Message) -> tuple[int, int]:
        """Which of its variants a message is, from 1, and how many there are."""
        variants = self.store.variants(message)
        return variants.index(message.id) + 1, len(variants)

    def turn_to_variant(self, message: Message, step: int) -> bool:
        """Show the next (1) or previous (-1) variant of a message; False if there is none."""
        variants = self.store.variants(message)
        index = variants.index(message.id) + step
        if not 0 <= index < len(variants):
            return False
        self.store.select(message.session_id, variants[index])
        self._read()
        return True

    def fork(self, message: Message) -> None:
        """Go on in a copy that ends with this message."""
        self.session_id = self.store.fork(message.session_id, message.id)
        self._read()

    @property
    def picture_names(self) -> tuple[str, ...]:
        """The names of the pictures that are shown."""
        return tuple(dict.fromkeys(name for message in self.messages for name in message.picture_names))

    def request(self, continues: bool = False, sees: bool = True) -> AnswerRequest:
        """What the model is asked: all that is shown, without the empty answer that waits to be filled.

        continues: the last message is a cut answer that goes on. sees: whether the model reads pictures; one that does
        not gets their names.
        """
        shown = self.messages if continues else self.messages[:-1]
        messages = [_message(message, sees) for message in shown]
        parameters = self.parameters
        if parameters.system:
            messages.insert(0, {"role": "system", "content": parameters.system})
        return AnswerRequest(
            messages=messages,
            continues_text=True,
            think=parameters.think,
            # A server knows better than our defaults what suits its model.
            sampling=changed(parameters.sampling()),
            max_tokens=parameters.max_tokens,
            context_limit=parameters.ctx,
            policy=ContextPolicy.DROP_MESSAGES,
        )

    def recipe(self) -> Recipe:
        """What is said and set here, for a model that begins with it. Pictures stay out: recipes are text."""
        from localllm.library.behaviour import SETTING_OF

        now, usual = self.parameters, self.defaults
        changed = {
            theirs: getattr(now, ours)
            for theirs, ours in SETTING_OF.items()
            if ours in NAMES and getattr(now, ours) not in (None, getattr(usual, ours))
        }
        messages = [
            {"role": str(message.role), "content": message.for_model()} for message in self.messages if message.content
        ]
        return Recipe(now.system, changed, messages)

    def title_request(self) -> AnswerRequest | None:
        """Ask for a title in the background, or None if the session has one or is not ready for one."""
        if self.session_id is None or len(self.messages) < 2 or self.store.summary(self.session_id).titled:
            return None
        said = [{"role": str(one.role), "content": one.content[:TITLE_INPUT_CHARS]} for one in self.messages[:2]]
        return AnswerRequest(
            messages=[*said, {"role": "user", "content": TITLE_PROMPT}],
            max_tokens=TITLE_TOKENS,
            think=False,
            background=True,
        )

    def _read(self) -> None:
        """Take the messages from the store. An answer without an end was cut off by the program's: it can go on."""
        assert self.session_id is not None
        self.messages = self.store.path(self.session_id)
        for message in self.messages:
            if message.role is Role.ASSISTANT and message.finish_reason is None:
                message.finish_reason = FinishReason.CANCELLED

    def _append(self, role: Role, content: str = "", attachments: tuple[Attachment, ...] = ()) -> Message:
        if self.session_id is None:
            self.session_id = self.store.create(self.model, self.parameters.stored())
        parent = self.messages[-1].id if self.messages else None
        model = self.model if role is Role.ASSISTANT else ""
        message = Message(0, self.session_id, parent, role, content, attachments=attachments, model=model)
        self.messages.append(self.store.add(message))
        return message

    def _cut_before(self, message: Message) -> None:
        index = next(place for place, shown in enumerate(self.messages) if shown.id == message.id)
        del self.messages[index:]
        self.store.cut(message.session_id, message.parent_id)

    def _store_parameters(self) -> None:
        if self.session_id is not None:
            self.store.set_parameters(self.session_id, self.model, self.parameters.stored())


def _message(message: Message, sees: bool) -> dict[str, Any]:
    """A message as models take it; its pictures come before its text."""
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
