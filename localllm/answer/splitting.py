"""Splits an answer's text into content, reasoning and tool calls while it streams.

Only the markers are dropped, and the white space between them and what they enclose or separate.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from localllm.answer.call_section import CallSection
from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.harmony import ANALYSIS, HarmonySplitter
from localllm.answer.tool_calls import CallFormat
from localllm.answer.tool_calls.call import Schema
from localllm.engine.stream import beginning_at_end

# Opening and closing marker, as in ChatTemplate; a closing "" is the end of the answer.
Marker = tuple[str, str]


class Splitter(Protocol):
    """Splits an answer. call: the section of tool calls that is open."""

    call: CallSection | None

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return the parts that are certain now, in order."""

    def flush(self) -> list[AnswerPart]:
        """Return the rest at the end of the answer."""

    def fork(self) -> Self:
        """A copy in the same state; not within a call."""


def answer_splitter(
    reasoning: Sequence[Marker],
    formats: Sequence[CallFormat] = (),
    tools: Mapping[str, Schema] | None = None,
    starts_in_reasoning: bool = False,
    starts_in_call: bool = False,
) -> Splitter:
    """A splitter for a template with these markers. See AnswerSplitter for the arguments."""
    if any(opening == ANALYSIS for opening, _ in reasoning):
        return HarmonySplitter(tools or {}, starts_in_reasoning, starts_in_call)
    return AnswerSplitter(reasoning, formats, tools or {}, starts_in_reasoning, starts_in_call)


class AnswerSplitter:
    """Splits an answer by its template's markers, which are left out.

    Reasoning and content stream, and so do tool calls: each part has their new pieces. Text that begins like a call but
    is not one is content, markers included. Reasoning is only recognised at the beginning of an answer; a later marker
    is text. White space is left out at both ends of reasoning, and where content meets reasoning or a call.
    """

    def __init__(
        self,
        reasoning: Sequence[Marker],
        formats: Sequence[CallFormat] = (),
        tools: Mapping[str, Schema] | None = None,
        starts_in_reasoning: bool = False,
        starts_in_call: bool = False,
    ) -> None:
        """reasoning: ChatTemplate's markers. formats: how calls are written; ignored without tools. tools: the schemas
        of arguments by name. starts_in_call: the answer is a call in the first format, whose opening ends the prompt
        unless the answer reasons first.
        """
        self._reasoning = list(reasoning)
        self._tools = tools or {}
        forms = formats if self._tools else ()
        self._openings = [(opening, form) for form in forms for opening in form.openings]
        self._section: Marker | None = reasoning[0] if starts_in_reasoning and reasoning else None
        self._begun = False  # whether reasoning can no longer come
        self._said = False  # whether there was content or a call
        self._held = ""
        self._trims = False  # whether to leave out the white space that comes next
        self._blanks: list[
            str
        ] = []  # white space after what was said, held until the next text shows whether to keep it
        self.call: CallSection | None = None
        self._forced = forms[0] if starts_in_call else None  # the format of a call that is the whole answer
        if self._section is None:
            self._open_forced()

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return the parts that are certain now, in order."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return [part for part in parts if part.text or part.deltas]

    def flush(self) -> list[AnswerPart]:
        """Return what is still held when the answer ends."""
        if self.call is not None:
            return self._ended_call(self.call)
        held, section, self._held, self._section = self._held, self._section, "", None
        text = self._take_blanks() + self._trimmed(held)
        part = AnswerPart(PartKind.CONTENT, text) if section is None else AnswerPart(PartKind.REASONING, text.rstrip())
        return [part] if part.text else []

    def fork(self) -> Self:
        """A copy in the same state; not within a call."""
        other = copy.copy(self)
        other._blanks = self._blanks.copy()
        return other

    def _open_forced(self) -> None:
        if self._forced is not None:
            opening = "" if self._forced.starts else self._forced.openings[0]
            self.call = CallSection(self._forced, self._tools, opening, from_prompt=True)
            self._forced, self._said, self._begun = None, True, True

    def _trimmed(self, text: str) -> str:
        """The text, without white space at its beginning after a marker."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text

    def _take_blanks(self) -> str:
        """The white space held so far, which then is held no longer."""
        text = "".join(self._blanks)
        self._blanks.clear()
        return text

    def _said_part(self, kind: PartKind, text: str) -> AnswerPart:
        """Say text, with the white space held before it; white space at its end is held."""
        text = self._trimmed(text)
        said = text.rstrip()
        part = AnswerPart(kind, self._take_blanks() + said if said else "")
        self._blanks.append(text[len(said) :])
        return part

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Process the text up to the next marker. Returns False if more text is needed."""
        if self.call is not None:
            return self._read_call(self.call, parts)
        if self._section is None:
            return self._read_content(parts)
        _, closing = self._section
        at = self._held.find(closing)
        end = at if at >= 0 else len(self._held) - beginning_at_end(self._held, [closing])
        body, self._held = self._held[:end], self._held[end:]
        parts.append(self._said_part(PartKind.REASONING, body))
        if at < 0:
            return False
        self._trims = True
        self._blanks.clear()
        self._held = self._held[len(closing) :]
        self._section = None
        if self._forced is not None and self._forced.starts:
            self._open_forced()
        return True

    def _read_call(self, call: CallSection, parts: list[AnswerPart]) -> bool:
        text, self._held = self._held, ""
        parts += call.push(text)
        if call.broken:
            parts += self._ended_call(call)
            return False
        if not call.closed:
            return False
        self.call, self._held, self._trims = None, call.rest, True
        self._blanks.clear()
        return True

    def _ended_call(self, call: CallSection) -> list[AnswerPart]:
        """What is left of a section of calls that does not continue; content includes the white space before it."""
        self.call = None
        parts = call.flush()
        blank = self._take_blanks()
        if call.has_calls:
            blank = ""
        return [
            AnswerPart(PartKind.CONTENT, blank + part.text) if part.kind is PartKind.CONTENT else part for part in parts
        ]

    def _read_content(self, parts: list[AnswerPart]) -> bool:
        text = self._held.lstrip()
        start = len(self._held) - len(text)
        self._begun = self._begun or not any(opening.startswith(text[: len(opening)]) for opening, _ in self._reasoning)
        firsts = [(opening, form) for opening, form in self._openings if form.starts and not self._said]
        anywhere: list[tuple[str, Marker | CallFormat]] = [entry for entry in self._openings if not entry[1].starts]
        if not self._begun:
            anywhere += [(marker[0], marker) for marker in self._reasoning]
        found = [(self._held.find(opening), opening, what) for opening, what in anywhere]
        found += [(start, opening, form) for opening, form in firsts if text.startswith(opening)]
        found = [entry for entry in found if entry[0] >= 0]
        at, opening, what = min(found, key=lambda entry: (entry[0], -len(entry[1])), default=(-1, "", None))
        if what is None and text and any(opening.startswith(text) for opening, _ in firsts):
            return False
        end = at if what else len(self._held) - beginning_at_end(self._held, [opening for opening, _ in anywhere])
        part = self._said_part(PartKind.CONTENT, self._held[:end])
        self._said = self._said or bool(part.text)
        parts.append(part)
        self._held = self._held[end + len(opening) if what else end :]
        if isinstance(what, CallFormat):
            self.call = CallSection(what, self._tools, opening)
            self._said = True
        elif what is not None:
            self._trims = True
            self._blanks.clear()
            self._section = what
        return what is not None


class ThinkingFirst:
    """Splits an answer whose constraint starts after its reasoning.

    Markers within the constrained answer are text. White space between reasoning and answer is dropped.
    """

    call: CallSection | None = None

    def __init__(self, marker: Marker) -> None:
        """marker: the constraint's; the text starts with its opening."""
        self._opening, self._closing = marker
        self._held = ""
        self._thinks, self._begun = True, False

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return the parts that are certain now, in order."""
        if not self._thinks:
            return self._content(text)
        self._held += text
        if len(self._held) < len(self._opening):
            return []
        thoughts = self._held.removeprefix(self._opening)
        at = thoughts.find(self._closing)
        if at < 0:
            certain = len(thoughts) - beginning_at_end(thoughts, [self._closing])
            self._opening, self._held = "", thoughts[certain:]
            return _part(PartKind.REASONING, thoughts[:certain])
        self._thinks, self._held = False, ""
        rest = thoughts[at + len(self._closing) :]
        return [*_part(PartKind.REASONING, thoughts[:at]), *self._content(rest)]

    def flush(self) -> list[AnswerPart]:
        """Return what is still held when the answer ends."""
        if self._thinks:
            return _part(PartKind.REASONING, self._held.removeprefix(self._opening))
        return []

    def fork(self) -> Self:
        """A copy in the same state."""
        return copy.copy(self)

    def _content(self, text: str) -> list[AnswerPart]:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return _part(PartKind.CONTENT, text)


def _part(kind: PartKind, text: str) -> list[AnswerPart]:
    return [AnswerPart(kind, text)] if text else []
