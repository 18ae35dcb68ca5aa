"""A model's chat template, from its file or the default of its family: messages in, the prompt's text out."""

import difflib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

from gguf_io.chat_template.capabilities import Capabilities, Marker, probe, tool_variables
from gguf_io.chat_template.messages import adapted, milder_forms, normalised
from gguf_io.chat_template.sandbox import MAX_SOURCE_CHARS, TemplateSandbox
from gguf_io.errors import TemplateError, shortened

_KEY = "tokenizer.chat_template"
# How templates spell "think" and "do not think".
_THINKING_SWITCHES: Mapping[str, tuple[object, object]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),
    "thinking_budget": (-1, 0),
    "reasoning": (True, False),
}

# What a caller may pass besides messages and tools. Any other variable keeps the template's default.
EXTRA_ARGUMENTS = frozenset(
    {
        "builtin_tools",
        "custom_tools",
        "date_string",
        "documents",
        "preserve_thinking",
        "reasoning_effort",
        "thinking_budget",
        "tools_in_user_message",
    }
)


class ChatTemplate:
    """Renders conversations with an untrusted template.

    The Jinja source runs in a child process with bounds on time, memory and output (`sandbox.py`); the child starts on
    the first use of anything but `source`, and ends with this object. Thread-safe. The rendered text begins with the
    BOS token only if the template writes it: encode it with special tokens parsed, and add BOS unless it is there.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        tool_use_source: str | None = None,
        warning: str | None = None,
        stop_strings: tuple[str, ...] = (),
    ) -> None:
        """source: the Jinja text; TemplateError if it exceeds `sandbox.MAX_SOURCE_CHARS` characters.

        bos_token, eos_token: their texts, "" if the model has none. tool_use_source: the template to use when tools are
        given, for files that have a separate one. warning: set when `source` is a default because the file has no
        template of its own. stop_strings: texts that end the assistant's turn if no token does.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"the chat template has {len(source)} characters, and the limit is {MAX_SOURCE_CHARS}")
        self.source = source
        self.warning = warning
        self.stop_strings = stop_strings
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._sandbox = TemplateSandbox(source)
        self._for_tools = None if tool_use_source is None else ChatTemplate(tool_use_source, bos_token, eos_token)

    @property
    def is_default(self) -> bool:
        """Whether the file has no template, so that the default of its family is used; `warning` says which."""
        return self.warning is not None

    @property
    def supports_tools(self) -> bool:
        """Whether the rendered text includes the tools."""
        return self._for_tools is not None or self.takes.tools

    @property
    def supports_thinking(self) -> bool:
        """Whether `enable_thinking` changes anything."""
        return not self.takes.variables.isdisjoint(_THINKING_SWITCHES)

    @property
    def reasoning_markers(self) -> tuple[Marker, ...]:
        """(opening, closing) texts around the model's reasoning, such as ("<think>", "</think>"); () if none known."""
        return self.takes.reasoning_markers

    @property
    def shown(self) -> str:
        """The source of the template used with tools, followed by the probe conversations that it rendered."""
        return (self._for_tools or self).takes.shown

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **extra: Any,
    ) -> str:
        """The prompt's text.

        messages: OpenAI's or Ollama's form; role, content (text, parts or null), tool_calls, reasoning. They are
            reshaped where this template requires it, see `messages.py`.
        tools: OpenAI's form, {"type": "function", "function": {...}}; TemplateError where `supports_tools` is false.
        enable_thinking: None is the template's own default; no effect where `supports_thinking` is false.
        extra: of EXTRA_ARGUMENTS only.

        Raises TemplateError when the template refuses the messages, naming its line and message, when it does not
        compile, and when it exceeds a limit.
        """
        if tools and self._for_tools is not None:
            return self._for_tools.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=enable_thinking,
                **extra,
            )
        if tools and not self.takes.tools:
            raise TemplateError("this model's chat template does not support tools; send the request without them")
        variables: dict[str, Any] = {
            **self._special_tokens,
            **tool_variables(list(tools or ()), self.takes.variables, self.takes.null_tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._thinking_switches(enable_thinking),
            **checked_arguments(extra),
        }
        fitted = adapted(normalised(messages, self.takes.developer), self.takes)
        refusals: list[str] = []
        for form in chain([fitted], milder_forms(fitted)):
            (outcome,) = self._sandbox.render([{**variables, "messages": form}])
            if outcome.refusal is None:
                return outcome.text
            refusals.append(outcome.refusal)
        raise TemplateError(refusals[0])

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with a reasoning opening, so that the model's first text is reasoning."""
        return any(prompt.rstrip().endswith(opening) for opening, _ in self.reasoning_markers)

    @cached_property
    def takes(self) -> Capabilities:
        return probe(self._sandbox, self.source, self._special_tokens)

    def _thinking_switches(self, enabled: bool | None) -> dict[str, object]:
        if enabled is None:
            return {}
        read = self.takes.variables
        return {name: on if enabled else off for name, (on, off) in _THINKING_SWITCHES.items() if name in read}


def checked_arguments(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """`extra`, unchanged. Raises TemplateError for a name that is not in EXTRA_ARGUMENTS."""
    for name in extra.keys() - EXTRA_ARGUMENTS:
        near = difflib.get_close_matches(name[:80], EXTRA_ARGUMENTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(EXTRA_ARGUMENTS))}"
        raise TemplateError(f"unknown template argument {shortened(name)!r}{hint}")
    return extra


class HasMetadata(Protocol):
    """An open model file, or anything else with metadata."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


def load_chat_template(model: HasMetadata, source: str | None = None) -> ChatTemplate:
    """The template in `tokenizer.chat_template`, and in `tokenizer.chat_template.tool_use` for requests with tools.

    A file without one gets the default of its family, see `defaults`; then `is_default` is true and `warning` says so.
    source: a Jinja template to use instead of all of these.
    Raises TemplateError if the template is not text or too long.
    """
    metadata = model.metadata
    listed = metadata.get("tokenizer.ggml.tokens")
    tokens = listed if isinstance(listed, Sequence) and not isinstance(listed, str) else ()
    bos_token = _token_text(metadata, tokens, "tokenizer.ggml.bos_token_id")
    eos_token = _token_text(metadata, tokens, "tokenizer.ggml.eos_token_id")
    if source:
        return ChatTemplate(source, bos_token, eos_token)
    source = _text(metadata, _KEY)
    if source:
        return ChatTemplate(source, bos_token, eos_token, tool_use_source=_text(metadata, f"{_KEY}.tool_use"))
    from gguf_io.chat_template.defaults import family_of  # nearly all files bring a template

    family = family_of(frozenset(tokens), str(metadata.get("general.name", "")))
    return ChatTemplate(
        family.source(),
        bos_token,
        eos_token,
        warning=f"this model file has no chat template; using {family.description}, which gives bad answers if the "
        "model was trained on another format",
        stop_strings=family.stop_strings,
    )


def _token_text(metadata: Mapping[str, Any], tokens: Any, key: str) -> str:
    """The token that `key` names; "" for none and for ids outside the vocabulary, which old files use for none."""
    index = metadata.get(key)
    return str(tokens[index]) if isinstance(index, int) and 0 <= index < len(tokens) else ""


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise TemplateError(f"{key} in the model file is not text")
    return value
