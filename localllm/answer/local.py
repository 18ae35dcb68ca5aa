"""Answers from an engine in this process: prepares a request, and splits the answer's tokens into parts."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from gguf_io.chat_template import load_chat_template
from gguf_io.chat_template.capabilities import Marker
from gguf_io.chat_template.messages import SYSTEM_ROLES
from gguf_io.chat_template.template import checked_arguments
from localllm.answer.harmony import before_answer, before_call
from localllm.answer.late_tools import history_of, name_of, ordered
from localllm.answer.local_stream import LocalStream
from localllm.answer.placeholders import has_images, images_of, without_images
from localllm.answer.rendering import RenderedChat, render, shared_length, shared_prefix_length
from localllm.answer.request import AnswerRequest, Message
from localllm.answer.splitter import AnswerScope, Splitter
from localllm.answer.splitting import ThinkingFirst, answer_splitter
from localllm.answer.tool_calls import CallFormat, call_formats
from localllm.answer.tool_calls.call import Schema, parameters_of
from localllm.engine.pins import Pin
from localllm.engine.request import ContextPolicy, Counts, GenerationRequest, RequestOptions, SamplingParams
from localllm.errors import RequestError
from localllm.library.behaviour import Behaviour
from localllm.library.errors import warn_once
from localllm.placement.loaded_model import LoadedModel
from localllm.text import counted

if TYPE_CHECKING:
    from gguf_io.chat_template import ChatTemplate
    from gguf_io.media import View
    from gguf_io.tokenizer import Tokenizer
    from localllm.answer.call_constraints import CallConstraints
    from localllm.engine.constraint import Constraint, LazyConstraint

SAMPLING = frozenset(field.name for field in fields(SamplingParams))
TEMPLATES_KEPT = 4  # from requests
CONTEXTS_OF_ANSWER = 10  # longest answer with a rolling context, in contexts, for models that never stop by themselves


class LocalModel:
    """A loaded model with the defaults of its manifest. Implements AnsweringModel."""

    def __init__(self, name: str, loaded: LoadedModel, behaviour: Behaviour = Behaviour()) -> None:  # noqa: B008 - frozen
        """name: for messages."""
        self.name = name
        self.loaded = loaded
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.template: ChatTemplate = loaded.template
        self._behaviour = behaviour
        self._lock = Lock()
        self._others: dict[str, LocalModel] = {}  # by requests' templates, the last used at the end

    @cached_property
    def call_formats(self) -> tuple[CallFormat, ...]:
        """How the model writes tool calls."""
        return call_formats(self.template.shown)

    @cached_property
    def _call_tokens(self) -> frozenset[int]:
        """The tokens that open tool calls; none if calls can be opened by several tokens."""
        openings = [opening for form in self.call_formats for opening in form.openings]
        encoded = [self.tokenizer.encode(text, add_special=False, parse_special=True) for text in openings]
        return frozenset(ids[0] for ids in encoded) if all(len(ids) == 1 for ids in encoded) else frozenset()

    @cached_property
    def _calls(self) -> "CallConstraints":
        from localllm.answer.call_constraints import CallConstraints  # imports grammars, which few requests need

        return CallConstraints(self.loaded)

    @property
    def most_choices(self) -> int:
        return self.loaded.engine.runner.info.max_sequences

    def prepare(self, request: AnswerRequest) -> "LocalPrompt":
        request.check()
        if request.template is not None:
            return self._shaped(request.template).prepare(replace(request, template=None))
        continues = request.continues_text and self.template.is_default and not has_images(request.messages)
        return self._text(request) if continues or request.prompt is not None else self._conversation(request)

    def expected_counts(self, request: AnswerRequest) -> "Future[Counts]":
        """What a request would reuse and compute if it were submitted now; see Engine.expected_counts.

        Raises as prepare does. Nothing about the request is kept.
        """
        model = copy(self)
        model.loaded = copy(self.loaded)
        model.loaded.tool_histories = dict(self.loaded.tool_histories)
        return self.loaded.engine.expected_counts(model.prepare(request).generation)

    def _shaped(self, template: str) -> "LocalModel":
        """This model with another chat template. The last TEMPLATES_KEPT are cached: each has its own process."""
        with self._lock:
            model = self._others.pop(template, None)
            if model is None:
                loaded = copy(self.loaded)
                loaded.template, loaded.shared_prefixes = load_chat_template(loaded.file, template), {}
                model = LocalModel(self.name, loaded, self._behaviour)
            self._others[template] = model
            while len(self._others) > TEMPLATES_KEPT:
                self._others.pop(next(iter(self._others)))
            return model

    def conversation(self, messages: Sequence[Message]) -> list[Message]:
        """The request's messages and those of the model's manifest, in the order of Ollama's generate route.

        System text (the request's, or else the model's), the model's messages, the rest of the request's.
        """
        first = next((at for at, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
        system = list(messages[:first])
        if not system and self._behaviour.system:
            system = [{"role": "system", "content": self._behaviour.system}]
        return [*system, *self._behaviour.messages, *messages[first:]]

    def _conversation(self, request: AnswerRequest) -> "LocalPrompt":
        if request.tools and not self.template.supports_tools:
            raise RequestError(f'"{self.name}" does not support tools')
        think = self._think(request)
        messages = list(request.messages) if request.before else self.conversation(request.messages)
        warnings: tuple[str, ...] = ()
        if not self.loaded.sees_images:
            images = len(images_of(messages))
            messages = without_images(messages)
            if left_out := images - len(images_of(messages)):
                what = counted(left_out, "picture")
                warnings = (f"{self.name} reads text only, without {what} in files and results of tools.",)
        listed: Sequence[Mapping[str, Any]] = [tool for tool in request.tools if name_of(tool) not in request.described]
        if listed and not (request.offered_tools or self._call_tokens):
            listed = []  # nothing could keep the model from calling them
        if listed and not request.before:
            history = history_of(self.loaded.tool_histories, messages, listed, request.namespace)
            messages, listed = history.told(messages), history.listed
        options = {
            "tools": [ordered(tool) for tool in listed],
            "enable_thinking": None if think is None else bool(think),
            **({"reasoning_effort": think} if isinstance(think, str) else {}),
            **self._today(),
            **checked_arguments(request.template_arguments),
        }
        tools = self._parameters(request)
        prompt = render(
            self.loaded,
            messages,
            continues=request.goes_on,
            namespace=request.namespace,
            image_tokens=(request.image_min_tokens, request.image_max_tokens),
            **options,
        )
        reasoning, header = self._before_format(request, bool(think), prompt) if request.is_constrained else (None, "")

        formats = self.call_formats if tools else ()
        splitter: Callable[[], Splitter] | None
        constraint: Constraint | LazyConstraint | None = None
        if request.has_format or request.grammar is not None:
            splitter = partial(ThinkingFirst, reasoning) if reasoning else None
            constraint = self._constraint(request, reasoning)
        else:
            must_call, inside = request.tool_choice is not None, prompt.starts_in_reasoning
            in_call = must_call and (not reasoning or (formats[0].starts and inside))
            splitter = partial(answer_splitter, self.template.reasoning_markers, formats, tools, inside, in_call)
            if must_call:
                constraint = self._calls.required(formats[0], tools, reasoning)
            elif tools:
                constraint = self._calls.lazy(formats, tools, splitter)
        has_parts = bool(tools or self.template.reasoning_markers)
        scope = partial(_scope_of, splitter) if splitter and has_parts else None
        opening = self.tokenizer.encode(header, add_special=False, parse_special=True)
        begins = bool(request.before) and prompt.tokens[:1] == (self.tokenizer.bos_id,)  # no BOS in the middle
        generation = replace(
            self._generation(request),
            prompt=(*request.before, *prompt.tokens[begins:], *opening),
            stop=self._stop(request),
            stop_scope=scope,
            ends=self.template.stop_strings,
            messages=None if request.before else prompt,
            images=prompt.images,
            constraint=constraint,
            shared_prefix=0 if request.before else shared_prefix_length(self.loaded, messages, prompt.tokens, options),
            pins=tuple(
                Pin(shared_length(self.loaded, self.conversation(one.messages), prompt.tokens, options), one.seconds)
                for one in request.pins
                if one.messages is not None
            ),
        )

        text = None if request.before else prompt.text + header
        prepared = self._prompt(generation, request, splitter, text)
        return replace(prepared, pictures=tuple(prompt.views), warnings=warnings)

    def _parameters(self, request: AnswerRequest) -> Mapping[str, Schema]:
        """The schemas of the tools that may be called, by name, in plain form. Raises RequestError."""
        chosen = request.chosen_tools
        if not request.offered_tools:
            return {}
        from localllm.answer.call_constraints import checked

        found = checked(parameters_of(request.offered_tools))
        return {name: found[name] for name in parameters_of(chosen)} if chosen else found

    def _today(self) -> Mapping[str, str]:
        """The date for templates that read date_string, in llama.cpp's form; Llama 3's default to a date in 2024."""
        return {"date_string": date.today().strftime("%d %b %Y")} if "date_string" in self.template.source else {}

    def _text(self, request: AnswerRequest) -> "LocalPrompt":
        if request.think:
            raise RequestError(f'"{self.name}" does not support thinking')
        if any(message["role"] in SYSTEM_ROLES for message in request.messages):
            raise RequestError("the model has no chat template for system text; put the text into the prompt")
        generation = replace(
            self._generation(request),
            prompt=self._text_tokens(request),
            stop=self._stop(request),
            constraint=self._constraint(request, None),
        )
        if request.messages and generation.context_policy is ContextPolicy.DROP_MESSAGES:
            generation = replace(generation, context_policy=ContextPolicy.ROLLING)
        return self._prompt(generation, request, None, None)

    def _text_tokens(self, request: AnswerRequest) -> tuple[int, ...]:
        tokenizer = self.tokenizer
        prompt = "".join(map(_text_of, request.messages)) if request.prompt is None else request.prompt
        if not isinstance(prompt, str):
            return tuple(prompt)
        if request.before:
            return (*request.before, *tokenizer.encode(prompt, add_special=False))
        if request.suffix is None:
            return tuple(tokenizer.encode(prompt))
        marks = (tokenizer.fim_prefix_id, tokenizer.fim_suffix_id, tokenizer.fim_middle_id)
        if None in marks:
            raise RequestError(f'"{self.name}" does not support insert')
        before, after, middle = (mark for mark in marks if mark is not None)
        bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        head, tail = (tokenizer.encode(text, add_special=False) for text in (prompt, request.suffix))
        gap = (before, *head, after, *tail, middle)
        return (*bos, *self._extra_tokens(request, len(bos) + len(gap)), *gap)

    def _extra_tokens(self, request: AnswerRequest, others: int) -> list[int]:
        """The other files of a gap to fill, as many of the last ones as fit into the context with the other tokens.

        Qwen 2.5 Coder's form: https://arxiv.org/abs/2409.12186, section 3.1. Models without its tokens get the same
        text.
        """
        if not request.extra:
            return []
        tokenizer, sep = self.tokenizer, self.tokenizer.fim_sep_id
        mark = [] if sep is None else [sep]

        def named(name: str, text: str = "") -> list[int]:
            return [*mark, *tokenizer.encode(f"{name}\n{text}", add_special=False)]

        begin = [] if tokenizer.fim_repo_id is None else [tokenizer.fim_repo_id, *named("repository")[len(mark) :]]
        end = named("current") if mark else []
        context = self.loaded.engine.context
        room = min(context, request.context_limit or context) - others - len(begin) - len(end)
        room -= min(max(request.max_tokens or 0, 0), max(room, 0) // 2)
        found: list[int] = []
        for name, text in reversed(request.extra):
            chunk = named(name or "file", text if text.endswith("\n") else f"{text}\n")
            if len(found) + len(chunk) > room:
                break
            found = chunk + found
        return [*begin, *found, *end] if found else []

    def _prompt(
        self,
        generation: GenerationRequest,
        request: AnswerRequest,
        splitter: Callable[[], Splitter] | None,
        text: str | None,
    ) -> "LocalPrompt":
        persist = not request.background and len(generation.prompt) >= request.persist_from
        if generation.context_policy is ContextPolicy.ROLLING:
            context = min(generation.context_limit or self.loaded.engine.context, self.loaded.engine.context)
            most = CONTEXTS_OF_ANSWER * context
            limit = most if generation.max_tokens is None else min(generation.max_tokens, most)
            generation = replace(generation, max_tokens=limit)
        whole = [Pin(len(generation.prompt), one.seconds) for one in request.pins if one.messages is None]
        pins = tuple(replace(pin, priority=request.priority) for pin in (*generation.pins, *whole) if pin.tokens)
        generation = replace(generation, persist=persist, pins=pins)
        return LocalPrompt(self.loaded, generation, splitter, text, request.one_call)

    def _generation(self, request: AnswerRequest) -> GenerationRequest:
        """The engine's request without the prompt and what depends on it."""
        own: Mapping[str, Any] = self._behaviour.settings
        sampling = {name: value for name, value in own.items() if name in SAMPLING} | dict(request.sampling)
        settings = self.loaded.placement.settings
        if settings.watermark_key:
            names = ("watermark_key", "watermark_delta", "watermark_gamma")
            sampling = {name: getattr(settings, name) for name in names} | sampling
        if sampling.get("mirostat") == 1:
            warn_once("mirostat 1 runs as mirostat 2, which superseded it")
        max_tokens = own.get("max_tokens") if request.max_tokens is None else request.max_tokens
        biases = sampling.get("logit_bias") or {}
        if request.tools and not request.offered_tools:
            sampling["logit_bias"] = biases = {**biases, **dict.fromkeys(self._call_tokens, -math.inf)}
        if biases and sum(bias == -math.inf for bias in biases.values()) >= self.tokenizer.vocab_size:
            raise RequestError("logit_bias bans every token")
        options = {option.name: getattr(request, option.name) for option in fields(RequestOptions)}
        usual = {"context_limit": own.get("ctx"), "adapters": self._behaviour.adapters, "keep": self._behaviour.keep}
        options |= {name: value for name, value in usual.items() if options[name] is None}
        return GenerationRequest(
            prompt=(),
            sampling=replace(request.defaults, **sampling),
            max_tokens=None if max_tokens is None or max_tokens < 0 else max_tokens,
            **options,
        )

    def _stop(self, request: AnswerRequest) -> tuple[str, ...]:
        return self._behaviour.stop if request.stop is None else request.stop

    def _think(self, request: AnswerRequest) -> bool | str | None:
        """Whether the model should think, or the effort; None if it cannot."""
        if request.think and not can_think(self.template):
            if request.may_skip_thinking:
                return None
            raise RequestError(f'"{self.name}" does not support thinking')
        if request.think is not None and not (
            request.may_skip_thinking and request.is_constrained and not self.template.reasoning_markers
        ):
            return request.think
        if request.is_constrained and not (request.thinks_before_format and self.template.reasoning_markers):
            return False
        return self.loaded.placement.settings.thinking if can_think(self.template) else None

    def _before_format(self, request: AnswerRequest, think: bool, prompt: RenderedChat) -> tuple[Marker | None, str]:
        """The markers of the reasoning before a constrained answer, and the text to add to the prompt.

        The opening marker is "" if the prompt already has it. Without thinking, the markers are None, and the text is
        the markup before the answer. Raises RequestError if the template does not show where reasoning ends.
        """
        markers = self.template.reasoning_markers
        calls = request.tool_choice is not None
        alone, after_reasoning = before_call(self.call_formats[0]) if calls else before_answer(markers)
        if think and not markers:
            raise RequestError(
                f'the template of "{self.name}" does not show where thinking ends; request a format or thinking, '
                "not both"
            )
        if not think and not prompt.starts_in_reasoning:
            return None, "" if request.goes_on and not calls else alone
        opening, closing = markers[0]
        return ("" if prompt.starts_in_reasoning else opening, closing + after_reasoning), ""

    def _constraint(self, request: AnswerRequest, reasoning: Marker | None) -> "Constraint | None":
        if not request.has_format and request.grammar is None:
            return None
        from localllm.engine.constraint import ConstraintKind

        if request.grammar is not None:
            kind, source = request.grammar
            return self.loaded.constraint(ConstraintKind(kind), source, reasoning)
        if request.format == "json":
            return self.loaded.constraint(ConstraintKind.JSON, after=reasoning)
        return self.loaded.constraint(ConstraintKind.JSON_SCHEMA, json.dumps(request.format), reasoning)


def can_think(template: "ChatTemplate") -> bool:
    """Whether a model can reason before it answers, optionally or always."""
    return template.supports_thinking or bool(template.reasoning_markers)


@dataclass(frozen=True, slots=True)
class LocalPrompt:
    """Implements Prompt. rendered: the conversation's text; None for a request without messages.

    one_call: see AnswerRequest.
    """

    loaded: LoadedModel
    generation: GenerationRequest
    splitter: Callable[[], Splitter] | None
    rendered: str | None = None
    one_call: bool = False
    pictures: "tuple[View, ...]" = ()
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.generation.prompt

    @property
    def text(self) -> str:
        return self.loaded.tokenizer.decode(self.tokens) if self.rendered is None else self.rendered

    def submit(self, choice: int = 0) -> "LocalStream":
        generation, seed = self.generation, self.generation.sampling.seed
        if choice and seed is not None and seed >= 0:
            generation = replace(generation, sampling=replace(generation.sampling, seed=seed + choice))
        splitter = self.splitter and self.splitter()
        stream = self.loaded.engine.submit(generation)
        spell = self.loaded.tokenizer.token_bytes
        return LocalStream(stream, splitter, spell, self.one_call, self.pictures, self.warnings)


def _scope_of(splitter: Callable[[], Splitter]) -> AnswerScope:
    return AnswerScope(splitter())


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
