"""Constraints on tool calls: each restricts a section of calls to the given tools and their schemas."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

from gguf_io.chat_template.capabilities import Marker
from localllm.answer.splitter import Splitter
from localllm.answer.tool_calls import CallFormat
from localllm.answer.tool_calls.call import Schema
from localllm.answer.tool_calls.grammar import CallGrammar
from localllm.engine.constraint import Constraint, ConstraintKind, HeldPart, LazyConstraint
from localllm.engine.constraint.trial import tried_tools
from localllm.errors import RequestError
from localllm.placement.loaded_model import LoadedModel

log = logging.getLogger(__name__)

# Text that the model would write by itself keeps the model's own tokens, however the tokenizer would cut it.
NO_FORCING = '%llguidance {"no_forcing": true}\n'
KEPT = 16  # tool sets whose compiled constraints are cached


class CallConstraints:
    """The constraints of one model's calls. Thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._held = lru_cache(KEPT)(partial(_held_parts, loaded))

    def lazy(
        self, formats: Sequence[CallFormat], tools: Mapping[str, Schema], splitter: Callable[[], Splitter]
    ) -> LazyConstraint:
        """A constraint on any calls that an answer opens. splitter: makes a splitter for the whole answer.

        Raises RequestError.
        """
        parts = self._held(tuple(formats), json.dumps(tools))
        vocabulary = self._loaded.constraint_vocabulary()
        return LazyConstraint(lambda: CallWatcher(splitter(), formats), parts, vocabulary)

    def required(self, form: CallFormat, tools: Mapping[str, Schema], reasoning: Marker | None) -> Constraint:
        """A constraint for an answer that is a section of calls; after reasoning, it includes the section's opening."""
        before = form.openings[0] if reasoning and not form.starts else ""
        return _compiled(self._loaded, form, tools, before=before, after=reasoning)[0]


def checked(tools: Mapping[str, Schema]) -> dict[str, Schema]:
    """The schemas of tools' arguments by name, in plain form. Raises RequestError if one is malformed."""
    found: dict[str, Schema] = json.loads(tried_tools(json.dumps(tools)))
    return found


def held_part(loaded: LoadedModel, form: CallFormat, tools: Mapping[str, Schema]) -> HeldPart:
    """The constraint on one format's sections, from after their opening. Raises RequestError."""
    return HeldPart(*_compiled(loaded, form, tools, NO_FORCING, goes_on=True))


def _held_parts(loaded: LoadedModel, formats: tuple[CallFormat, ...], tools: str) -> list[HeldPart]:
    """tools: JSON."""
    return [held_part(loaded, form, json.loads(tools)) for form in formats]


def _compiled(
    loaded: LoadedModel,
    form: CallFormat,
    tools: Mapping[str, Schema],
    options: str = "",
    before: str = "",
    after: Marker | None = None,
    goes_on: bool = False,
) -> tuple[Constraint, bool]:
    """The constraint, and whether the answer ends with the section."""

    def compiled(tools: Mapping[str, Schema]) -> tuple[Constraint, bool]:
        grammar = CallGrammar(form, tools, loaded.constraint_vocabulary())
        source = options + grammar.section(before, goes_on)
        return loaded.constraint(ConstraintKind.LARK, source, after), grammar.ends_answer

    try:
        return compiled(tools)
    except RequestError as error:
        log.warning("arguments of tool calls are only constrained to be JSON objects: %s", error)
        return compiled({name: {"type": "object"} for name in tools})


class CallWatcher:
    """Detects where calls open and close in an answer. Implements engine.constraint.lazy.Watcher."""

    def __init__(self, splitter: Splitter, formats: Sequence[CallFormat]) -> None:
        self._splitter = splitter
        self._formats = formats

    @property
    def is_open(self) -> bool:
        return self._splitter.call is not None and self._splitter.call.form in self._formats

    def watch(self, text: str) -> tuple[int, str] | None:
        before = self._splitter.call
        self._splitter.push(text)
        call = self._splitter.call
        if call is None or call is before or call.form not in self._formats:
            return None
        opening = "" if call.form.starts else call.opening
        return self._formats.index(call.form), call.source.removeprefix(opening)
