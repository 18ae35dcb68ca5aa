"""From messages to a request: what the three protocols share, once they have spelt messages alike."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gguf_io.chat_template import ChatTemplate
from localllm.engine.answer_parts import Marker
from localllm.engine.chat_prompt import ChatPrompt
from localllm.engine.constraint import Constraint, ConstraintKind
from localllm.engine.harmony import answer_splitter, before_answer
from localllm.engine.loaded_model import LoadedModel
from localllm.engine.request import ContextPolicy, GenerationRequest, SamplingParams
from localllm.library.behaviour import Behaviour
from localllm.server.errors import ApiError
from localllm.server.forced_calls import ForcedCall
from localllm.server.front.model import ForeignModel, ForeignTemplate, Gap, Prompt
from localllm.server.images import check_images
from localllm.server.service import Prepared
from localllm.server.thinking import ThinkingFirst

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
TEXT_ONLY = "only text is read here, and images in the messages of users; sound and documents are not supported"


@dataclass(frozen=True, slots=True)
class Limits:
    """How an answer is sampled and where it ends. given: the sampling parameters that the client itself has set."""

    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    context_limit: int | None = None
    policy: ContextPolicy = ContextPolicy.REFUSE
    background: bool = False
    adapters: tuple[tuple[int, float], ...] | None = None
    given: frozenset[str] = frozenset()
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be answered. format: None, "json", or a JSON Schema, of a tool call where `calls` says so.

    think None is the model's own way, and no thinking where there is a format. continues: the last message is an
    answer that goes on.
    """

    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    think: bool | str | None = None
    format: Any = None
    calls: bool = False
    continues: bool = False


def with_defaults(chat: Chat, behaviour: Behaviour) -> Chat:
    """The conversation with the messages that begin every one, and the system text where it brings none."""
    messages = [*behaviour.messages, *chat.messages]
    if behaviour.system and not any(message["role"] in ("system", "developer") for message in chat.messages):
        messages.insert(0, {"role": "system", "content": behaviour.system})
    return replace(chat, messages=messages)


def prepare_chat(model: LoadedModel | ForeignModel, chat: Chat, limits: Limits) -> Prepared:
    """Render, tokenise, constrain; or leave that to the server where the model is.

    Raises ApiError 400 for what the model cannot do, TemplateError, RequestError.
    """
    check_roles(chat.messages)
    check_images(chat.messages)
    if isinstance(model, ForeignModel):
        return Prepared(model.chat_request(chat, limits))
    template = model.template
    if chat.tools and not template.supports_tools:
        raise ApiError(400, f'"{chat.name}" does not support tools')
    if chat.think and not can_think(template):
        raise ApiError(400, f'"{chat.name}" does not support thinking')
    think = False if chat.format not in (None, "") and chat.think is None else chat.think
    effort = {"reasoning_effort": think} if isinstance(think, str) else {}
    prompt = model.chat_prompt(
        chat.messages,
        tools=chat.tools or None,
        enable_thinking=None if think is None else bool(think),
        continues=chat.continues,
        **effort,
    )
    first, header = _before_format(model, chat, prompt) if chat.format not in (None, "") else (None, "")
    constraint = constraint_of(model, chat.format, first)
    request = GenerationRequest(
        prompt=(*prompt.tokens, *model.tokenizer.encode(header, add_special=False, parse_special=True)),
        sampling=limits.sampling,
        max_tokens=limits.max_tokens,
        stop=(*limits.stop, *prompt.stop),
        context_limit=limits.context_limit,
        context_policy=limits.policy,
        background=limits.background,
        adapters=limits.adapters,
        messages=prompt.messages,
        constraint=constraint,
        images=prompt.images,
        keep=limits.keep,
    )
    if constraint is None:
        calls = template.tool_call_markers if chat.tools else ()
        splitter = answer_splitter(template.reasoning_markers, calls, prompt.starts_in_reasoning)
        return Prepared(request, splitter, prompt.text)
    answer = ForcedCall() if chat.calls else None
    return Prepared(request, ThinkingFirst(first, answer) if first else answer, prompt.text)


def can_think(template: ChatTemplate | ForeignTemplate) -> bool:
    """Whether a model reasons before it answers: where it is told to, or always."""
    return template.supports_thinking or bool(template.reasoning_markers)


def _before_format(model: LoadedModel, chat: Chat, prompt: ChatPrompt) -> tuple[Marker | None, str]:
    """The reasoning that comes before an answer with a format, its opening "" where the prompt has opened it already.

    None where the model is not to think; then with what the prompt ends with, so that the answer can begin. ApiError
    400 where its template does not show where reasoning ends.
    """
    markers = model.template.reasoning_markers
    alone, joined = before_answer(markers)
    if chat.think and not markers:
        raise ApiError(400, f'"{chat.name}" does not show where its thinking ends; ask for format or think, not both')
    if not chat.think and not prompt.starts_in_reasoning:
        return None, "" if chat.continues else alone
    opening, closing = markers[0]
    return ("" if prompt.starts_in_reasoning else opening, closing + joined), ""


def prepare_text(model: LoadedModel | ForeignModel, prompt: Prompt, limits: Limits, format: Any = None) -> Prepared:
    """A prompt without messages: token ids, where the model is here. Raises RequestError."""
    if isinstance(model, ForeignModel):
        return Prepared(model.text_request(prompt, limits, format))
    assert not isinstance(prompt, str | Gap)
    request = GenerationRequest(
        prompt=tuple(prompt),
        sampling=limits.sampling,
        max_tokens=limits.max_tokens,
        stop=limits.stop,
        context_limit=limits.context_limit,
        context_policy=limits.policy,
        background=limits.background,
        adapters=limits.adapters,
        constraint=constraint_of(model, format),
        keep=limits.keep,
    )
    return Prepared(request)


def infill_tokens(model: LoadedModel | ForeignModel, name: str, prefix: str, suffix: str) -> Prompt:
    """A prompt that asks for what stands between prefix and suffix. ApiError 400 where the model cannot fill in."""
    if isinstance(model, ForeignModel):
        return Gap(prefix, suffix)
    tokenizer = model.tokenizer
    marks = (tokenizer.fim_prefix_id, tokenizer.fim_suffix_id, tokenizer.fim_middle_id)
    if None in marks:
        raise ApiError(400, f'"{name}" does not support insert')
    before, after, middle = (mark for mark in marks if mark is not None)
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    head = tokenizer.encode(prefix, add_special=False)
    return [*bos, before, *head, after, *tokenizer.encode(suffix, add_special=False), middle]


def constraint_of(model: LoadedModel, format: Any, after: Marker | None = None) -> Constraint | None:
    """The constraint of a `format`, behind a section of reasoning where there is one: None and "" are none.

    ApiError 400 for what is neither "json" nor a schema.
    """
    if format is None or format == "":
        return None
    if format == "json":
        return model.constraint(ConstraintKind.JSON, after=after)
    if isinstance(format, dict):
        return model.constraint(ConstraintKind.JSON_SCHEMA, json.dumps(format), after)
    raise ApiError(400, 'invalid format: expected "json" or a JSON schema')


def check_roles(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError 400 for a role that no protocol has."""
    for message in messages:
        if message["role"] not in ROLES:
            raise ApiError(400, f"unknown role {str(message['role'])[:32]!r}; roles are {', '.join(sorted(ROLES))}")
