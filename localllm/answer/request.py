"""Requests to a model: answer a conversation, or continue a text."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from localllm.engine.request import RequestOptions, SamplingParams
from localllm.errors import RequestError

Message = Mapping[str, Any]
_DEFAULTS = SamplingParams()

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
UNLIMITED = -1  # for max_tokens: overrides the model's own limit
MAX_CALLS = 4096  # tool calls in a conversation


@dataclass(frozen=True, slots=True)
class PinnedStart:
    """The beginning of a prompt that stays in memory: these messages and the tools before them; None for all of it."""

    seconds: float
    messages: Sequence[Message] | None = None


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """What a prompt is made of: the messages of a conversation, or a text."""

    # In OpenAI's or Ollama's format. A content is text or a list of parts, {"type": "text", "text": str} and {"type":
    # "image", "data": bytes} of a picture or WAV file, with "detail": "low" or "high" if it shall take few or many
    # tokens.
    messages: Sequence[Message] = ()
    # Whether the answer continues an assistant's message at the end, unless it has tool calls, or is another message.
    may_go_on: bool = True
    # A model without its own chat template continues the messages' text.
    continues_text: bool = False
    # The text or token ids to continue, instead of messages.
    prompt: str | Sequence[int] | None = None
    # The text after the gap to fill.
    suffix: str | None = None
    # The names and texts of other files, for the gap.
    extra: Sequence[tuple[str, str]] = ()
    # Token ids before the prompt or the messages.
    before: Sequence[int] = ()
    # A Jinja chat template for this request, instead of the model's.
    template: str | None = None
    # Further arguments of the chat template; see gguf_io.chat_template.template.EXTRA_ARGUMENTS.
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Whether the answer continues the last message."""
        last = self.messages[-1] if self.messages else {}
        return self.may_go_on and last.get("role") == "assistant" and not last.get("tool_calls")


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """The tools of a conversation, and which of them may or must be called."""

    # In OpenAI's format.
    tools: Sequence[Mapping[str, Any]] = ()
    # The names of those that the messages define, so that the prompt's list does not.
    described: Collection[str] = ()
    # The names of those that may be called; None for all.
    allowed: Collection[str] | None = None
    # The name of the tool that must be called, "" for any of them.
    tool_choice: str | None = None
    # The answer ends with its first tool call.
    one_call: bool = False

    @property
    def offered_tools(self) -> list[Mapping[str, Any]]:
        """The tools that may be called."""
        return [tool for tool in self.tools if self.allowed is None or tool["function"]["name"] in self.allowed]

    @property
    def chosen_tools(self) -> list[Mapping[str, Any]]:
        """The tools, one of which must be called; [] if none must. Raises RequestError if the named one is missing."""
        if self.tool_choice is None:
            return []
        found = [tool for tool in self.offered_tools if self.tool_choice in ("", tool["function"]["name"])]
        if not found:
            raise RequestError(
                f"tool_choice names {self.tool_choice[:64]!r}, which is not among the tools"
                if self.tool_choice
                else "tool_choice requires a tool call, but no tools are offered"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """What the answer must fit, and whether reasoning precedes it."""

    # "json" or a JSON Schema that the answer must fit.
    format: Any = None
    # Its language (a value of ConstraintKind) and source, instead.
    grammar: tuple[str, str] | None = None
    # Whether to reason first, or the effort. None: reason if the model can and the setting `thinking` is on; before a
    # format or a forced tool call only with thinks_before_format.
    think: bool | str | None = None
    thinks_before_format: bool = False
    # A model that cannot reason answers without reasoning instead of refusing.
    may_skip_thinking: bool = False

    @property
    def has_format(self) -> bool:
        """Whether the answer must fit a format."""
        return self.format is not None and self.format != ""


@dataclass(frozen=True, kw_only=True)
class AnswerRequest(PromptSource, ToolChoice, AnswerForm, RequestOptions):
    """A conversation to answer, or a text to continue, for any model. None means the model's default."""

    # Parameters by the names of SamplingParams. Others are the model's own, else those of `defaults`. Only these are
    # sent to a remote server.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    defaults: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    # Stop strings; None for the model's own.
    stop: tuple[str, ...] | None = None
    # The least and the most tokens of each picture; None for the settings'.
    image_min_tokens: int | None = None
    image_max_tokens: int | None = None
    # Beginnings of the prompt to keep in memory for a time.
    pins: tuple[PinnedStart, ...] = ()
    # Prompts of at least this many tokens may be written to the disk cache.
    persist_from: int = 0

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must fit a format, or be a tool call."""
        return self.has_format or self.grammar is not None or self.tool_choice is not None

    def check(self) -> None:
        """Raise RequestError if the request is invalid for any model."""
        calls = 0
        for message in self.messages:
            if message["role"] not in ROLES:
                roles = ", ".join(sorted(ROLES))
                raise RequestError(f"unknown role {str(message['role'])[:32]!r}; roles are {roles}")
            calls += len(message.get("tool_calls") or ())
        if calls > MAX_CALLS:
            raise RequestError(f"the messages have {calls} tool calls; at most {MAX_CALLS} are allowed")
        if self.has_format and self.format != "json" and not isinstance(self.format, dict):
            raise RequestError('invalid format: expected "json" or a JSON schema')
        if self.has_format and self.grammar is not None:
            raise RequestError("a format and a grammar exclude each other; send one of them")
        if (self.has_format or self.grammar is not None) and self.tool_choice is not None:
            raise RequestError("format cannot be used with a tool_choice that requires a tool call")


def changed(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from the defaults, by name."""
    values = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    return {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}
