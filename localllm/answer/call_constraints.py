"""Constraints on tool calls: each restricts a section of calls to the given tools and their schemas."""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Self

from localllm.answer.splitter import Splitter
from localllm.answer.splitting import Marker
from localllm.answer.tool_calls import CallFormat
from localllm.answer.tool_calls.call import Schema
from localllm.answer.tool_calls.grammar import CallGrammar
from localllm.engine.loaded_model import LoadedModel
from localllm.errors import RequestError

if TYPE_CHECKING:
    from localllm.engine.constraint import Constraint, HeldPart, LazyConstraint

log = logging.getLogger(__name__)

# Text that the model would write by itself keeps the model's own tokens, however the tokenizer would cut it.
NO_FORCING = '%llguidance {"no_forcing": true}\n'
KEPT = 16  # tool sets whose compiled constraints are cached


class CallConstraints:
    """The constraints of one model's calls. Thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._lock = Lock()
        self._compiled: OrderedDict[str, list[HeldPart]] = OrderedDict()

    def lazy(
        self, formats: Sequence[CallFormat], tools: Mapping[str, Schema], splitter: Callable[[], Splitter]
    ) -> "LazyConstraint":
        """A constraint on any calls that an answer opens. splitter: makes a splitter for the whole answer.

        Raises RequestError.
        """
        from localllm.engine.constraint import LazyConstraint

        key = json.dumps([[form.openings[0] for form in formats], tools])
        with self._lock:
            parts = self._compiled.pop(key, None)
        if parts is None:
            parts = [self.held(form, tools) for form in formats]
        with self._lock:
            self._compiled[key] = parts
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        openings = [opening for form in formats for opening in form.openings]
        return LazyConstraint(
            lambda: CallWatcher(splitter(), formats), parts, openings, self._loaded.constraint_vocabulary()
        )

    def required(self, form: CallFormat, tools: Mapping[str, Schema], reasoning: Marker | None) -> "Constraint":
        """A constraint for an answer that is a section of calls; after reasoning, it includes the section's opening."""
        before = form.openings[0] if reasoning and not form.starts else ""
        return self._compile(form, tools, "", before, reasoning)[0]

    def held(self, form: CallFormat, tools: Mapping[str, Schema]) -> "HeldPart":
        """The constraint on one format's sections, from after their opening. Raises RequestError."""
        from localllm.engine.constraint import HeldPart

        return HeldPart(*self._compile(form, tools, NO_FORCING))

    def _compile(
        self,
        form: CallFormat,
        tools: Mapping[str, Schema],
        options: str,
        before: str = "",
        after: Marker | None = None,
    ) -> "tuple[Constraint, bool]":
        try:
            return self._compiled_once(form, tools, options, before, after)
        except RequestError as error:
            log.warning("arguments of tool calls are only constrained to be JSON objects: %s", error)
            return self._compiled_once(form, {name: {"type": "object"} for name in tools}, options, before, after)

    def _compiled_once(
        self, form: CallFormat, tools: Mapping[str, Schema], options: str, before: str, after: Marker | None
    ) -> "tuple[Constraint, bool]":
        from localllm.engine.constraint import ConstraintKind
        from localllm.engine.constraint.compile import embedded

        vocabulary = self._loaded.constraint_vocabulary()
        grammar = CallGrammar(form, tools, vocabulary.pieces, embedded, vocabulary.ends)
        source = options + grammar.section(before)
        return self._loaded.constraint(ConstraintKind.LARK, source, after), grammar.ends_answer


class CallWatcher:
    """Detects where calls open in an answer. Implements engine.constraint.lazy.Watcher."""

    def __init__(self, splitter: Splitter, formats: Sequence[CallFormat]) -> None:
        self._splitter = splitter
        self._formats = formats

    def watch(self, text: str) -> tuple[int, str] | None:
        was_open = self._splitter.call is not None
        self._splitter.push(text)
        call = self._splitter.call
        if was_open or call is None:
            return None
        opening = "" if call.form.starts else call.opening
        return self._formats.index(call.form), call.source.removeprefix(opening)

    def fork(self) -> Self:
        return type(self)(self._splitter.fork(), self._formats)
