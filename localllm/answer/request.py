"""What may be asked of a model: to answer a conversation, or to continue a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from localllm.engine.request import ContextPolicy, SamplingParams
from localllm.errors import RequestError

Message = Mapping[str, Any]
_USUAL = SamplingParams()

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
SYSTEM_ROLES = frozenset({"system", "developer"})
# In place of max_tokens: to the end of the context, whatever the model's own limit.
UNLIMITED = -1
MAX_CALLS = 4096  # tool calls of a conversation; each result is compared with those that have none yet


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """A conversation to answer, or a text to continue, with its limits. Knows no model; None leaves it to the model.

    messages: OpenAI's or Ollama's form. A content is text or a list of parts, {"type": "text", "text": str} and
        {"type": "image", "data": bytes}, a PNG or JPEG. An assistant's message at the end, without tool calls, is the
        beginning of the answer.
    continues_text: a model without a chat template of its own continues the messages' text.
    prompt: the text or token ids to continue, instead of messages. suffix: what follows the gap that the answer fills.
        before: token ids that come before the prompt.
    tools: OpenAI's form. tool_choice: the name of the tool that must be called, "" for any of them.
    format: "json" or a JSON Schema that the answer must fit.
    think: whether to reason first, or with which effort. None: if the model can, but only with thinks_before_format
        before an answer that must fit a format or be a tool call.
    sampling: parameters by the names of SamplingParams. What is left out is the model's own, else that of `defaults`;
        a server elsewhere is sent nothing but these.
    stop: None takes the model's own stop strings.
    adapters, keep, background, namespace: as GenerationRequest has them.
    persist_from: prompts of at least this many tokens may be kept in the disk cache.
    """

    messages: Sequence[Message] = ()
    continues_text: bool = False
    prompt: str | Sequence[int] | None = None
    suffix: str | None = None
    before: Sequence[int] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | None = None
    format: Any = None
    think: bool | str | None = None
    thinks_before_format: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    defaults: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    ignore_eos: bool = False
    context_limit: int | None = None
    policy: ContextPolicy = ContextPolicy.REFUSE
    keep: int | None = None
    adapters: tuple[tuple[int, float], ...] | None = None
    background: bool = False
    persist_from: int = 0
    namespace: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and not last.get("tool_calls")

    @property
    def has_format(self) -> bool:
        """Whether the answer must fit a format."""
        return self.format is not None and self.format != ""

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must fit a format, or be a tool call."""
        return self.has_format or self.tool_choice is not None

    @property
    def chosen_tools(self) -> list[Mapping[str, Any]]:
        """The tools that must be called, if any must. Raises RequestError where the named one is not offered."""
        if self.tool_choice is None:
            return []
        found = [tool for tool in self.tools if self.tool_choice in ("", tool["function"]["name"])]
        if not found:
            raise RequestError(
                f"tool_choice names {self.tool_choice[:64]!r}, which is not among the tools"
                if self.tool_choice
                else "tool_choice asks for a tool call, and no tools are offered"
            )
        return found

    def check(self) -> None:
        """Raise RequestError for what no model can follow."""
        calls = 0
        for message in self.messages:
            if message["role"] not in ROLES:
                roles = ", ".join(sorted(ROLES))
                raise RequestError(f"unknown role {str(message['role'])[:32]!r}; roles are {roles}")
            calls += len(message.get("tool_calls") or ())
        if calls > MAX_CALLS:
            raise RequestError(f"the messages have {calls} tool calls; at most {MAX_CALLS} are taken")
        if self.has_format and self.format != "json" and not isinstance(self.format, dict):
            raise RequestError('invalid format: expected "json" or a JSON schema')
        if self.has_format and self.tool_choice is not None:
            raise RequestError("a format and a tool_choice that asks for a call exclude each other")


def changed(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from the defaults, by name."""
    values = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    return {name: value for name, value in values.items() if value != getattr(_USUAL, name)}
