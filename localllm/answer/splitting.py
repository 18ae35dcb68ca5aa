"""Splits an answer's text into content, reasoning and tool calls while it streams.

Only the markers are dropped, and the white space between them and what they enclose. Of the white space around calls,
one piece is kept between the texts before and after them.
"""

import json
from collections.abc import Mapping, Sequence

from gguf_io.chat_template.capabilities import Marker
from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.harmony import ANALYSIS, HarmonySplitter
from localllm.answer.splitter import CallSection, Splitter
from localllm.answer.tool_calls import CallFormat
from localllm.answer.tool_calls.call import Schema
from localllm.answer.tool_calls.formats import LOOSE
from localllm.engine.stream import beginning_at_end

FENCE = "```"
LOOSE_MARKS = ("`", "<", "{", "[")  # how a line begins that may hold a call without the template's markers


def answer_splitter(
    reasoning: Sequence[Marker],
    formats: Sequence[CallFormat],
    tools: Mapping[str, Schema],
    starts_in_reasoning: bool = False,
    starts_in_call: bool = False,
) -> Splitter:
    """A splitter for a template with these markers. See AnswerSplitter for the arguments."""
    if any(opening == ANALYSIS for opening, _ in reasoning):
        return HarmonySplitter(tools, starts_in_reasoning, starts_in_call)
    return AnswerSplitter(reasoning, formats, tools, starts_in_reasoning, starts_in_call)


class AnswerSplitter(Splitter):
    """Splits an answer by its template's markers, which are left out.

    Reasoning and content stream, and so do tool calls: each part has their new pieces. Text that begins like a call but
    is not one is content, markers included. Reasoning is only recognised at the beginning of an answer; a later marker
    is text. White space is left out at both ends of reasoning, and where content meets reasoning or a call. Content
    after calls begins with the white space that was before them, or else after them, or else a newline.
    """

    def __init__(
        self,
        reasoning: Sequence[Marker],
        formats: Sequence[CallFormat],
        tools: Mapping[str, Schema],
        starts_in_reasoning: bool = False,
        starts_in_call: bool = False,
    ) -> None:
        """reasoning: ChatTemplate's markers. formats: how calls are written; none without tools. tools: the schemas of
        arguments by name. starts_in_call: the answer is a call in the first format, whose opening ends the prompt
        unless the answer reasons first.
        """
        super().__init__()
        self._reasoning = list(reasoning)
        self._tools = tools
        self._openings = [(opening, form) for form in formats if not form.starts for opening in form.openings]
        # A bare object opens a call only once it names a tool.
        self._firsts = [
            (f"{opening}{json.dumps(name, ensure_ascii=False)[1:]}", form)
            for form in formats
            if form.starts
            for opening in form.openings
            for name in tools
        ]
        self._takes_loose = bool(formats)
        self._line = ""  # the beginning of the content's current line
        self._in_fence = False  # whether that line is in a code fence
        self._section: Marker | None = reasoning[0] if starts_in_reasoning and reasoning else None
        self._begun = False  # whether reasoning can no longer come
        self._said = False  # whether there was content or a call
        self._wrote = False  # whether there was content
        self._gap: str | None = None  # since a call after content: the white space that separates it from more content
        self._gap_is_open = False  # whether the white space after the call belongs to the gap
        self._trims = False  # whether to leave out the white space that comes next
        # White space after what was said, held until the next text shows whether to keep it.
        self._blanks: list[str] = []
        self._forced = formats[0] if starts_in_call else None  # the format of a call that is the whole answer
        if self._section is None:
            self._open_forced()

    def _rest(self, held: str) -> AnswerPart:
        text = self._take_blanks() + self._trimmed(held)
        if self._section is None:
            return AnswerPart(PartKind.CONTENT, self._separated(text) if text else "")
        return AnswerPart(PartKind.REASONING, text.rstrip())

    def _open_forced(self) -> None:
        if self._forced is not None:
            opening = "" if self._forced.starts else self._forced.openings[0]
            self.call = CallSection(self._forced, self._tools, opening, from_prompt=True)
            self._forced, self._said, self._begun, self._trims = None, True, True, False

    def _trimmed(self, text: str) -> str:
        """The text, without white space at its beginning after a marker."""
        if self._trims:
            said = text.lstrip()
            if self._gap is not None and self._gap_is_open:
                self._gap += text[: len(text) - len(said)]
            text, self._trims = said, not said
        return text

    def _separated(self, text: str) -> str:
        """Content, with what separates it from content before a call."""
        gap, self._gap = self._gap, None
        self._wrote = True
        return text if gap is None or text[0].isspace() else (gap or "\n") + text

    def _skip_blanks(self) -> None:
        """Leave out the white space on both sides of a marker."""
        self._trims = True
        self._blanks.clear()

    def _take_blanks(self) -> str:
        """The white space held so far, which then is held no longer."""
        text = "".join(self._blanks)
        self._blanks.clear()
        return text

    def _said_part(self, kind: PartKind, text: str) -> AnswerPart:
        """Say text, with the white space held before it; white space at its end is held."""
        text = self._trimmed(text)
        said = text.rstrip()
        part = self._take_blanks() + said if said else ""
        self._blanks.append(text[len(said) :])
        return AnswerPart(kind, self._separated(part) if part and kind is PartKind.CONTENT else part)

    def _read(self, parts: list[AnswerPart]) -> bool:
        if self._section is None:
            return self._read_content(parts)
        text, closed = self._up_to(self._section[1])
        parts.append(self._said_part(PartKind.REASONING, text))
        if closed:
            self._section = None
            self._skip_blanks()
            if self._forced is not None and self._forced.starts:
                self._open_forced()
        return closed

    def _read_call(self, call: CallSection, parts: list[AnswerPart]) -> bool:
        ended = super()._read_call(call, parts)
        if call.closed:
            self._leave_calls()
        return ended

    def _leave_calls(self) -> None:
        self._mark_gap("".join(self._blanks))
        self._skip_blanks()
        self._said, self._line, self._in_fence = True, "", False

    def _in_content(self) -> bool | None:
        if self._section is not None or self._trims:
            return False
        return None if not self._begun or (self._firsts and not self._said) else True

    def _ended_call(self, call: CallSection) -> list[AnswerPart]:
        if call.broken:
            parts = super()._ended_call(call)
            if not call.is_call:
                return [self._content(part.text) for part in parts]
            self._leave_calls()
            return parts
        blank = self._take_blanks()  # before the section; it belongs to content, but not beside a call
        parts = super()._ended_call(call)
        if call.has_calls:
            self._mark_gap(blank)
        self._note_lines("".join(part.text for part in parts if part.kind is PartKind.CONTENT))
        return [
            AnswerPart(PartKind.CONTENT, self._separated(part.text if call.has_calls else blank + part.text))
            if part.kind is PartKind.CONTENT and part.text
            else part
            for part in parts
        ]

    def _mark_gap(self, blank: str) -> None:
        """Note that content which follows must be separated. blank: the white space before the call."""
        if self._wrote:
            self._gap = self._gap or blank
            self._gap_is_open = not self._gap

    def _read_content(self, parts: list[AnswerPart]) -> bool:
        if self._begun and not self._takes_loose:  # neither reasoning nor calls can come
            parts.append(self._content(self._held))
            self._held = ""
            return False
        text = self._held.lstrip()
        start = len(self._held) - len(text)
        self._begun = self._begun or not any(opening.startswith(text[: len(opening)]) for opening, _ in self._reasoning)
        firsts = [] if self._said else self._firsts
        anywhere: list[tuple[str, Marker | CallFormat]] = [*self._openings]
        if not self._begun:
            anywhere += [(marker[0], marker) for marker in self._reasoning]
        found = [(self._held.find(opening), opening, what) for opening, what in anywhere]
        found += [(start, opening, form) for opening, form in firsts if text.startswith(opening)]
        found = [entry for entry in found if entry[0] >= 0]
        at, opening, what = min(found, key=lambda entry: (entry[0], -len(entry[1])), default=(-1, "", None))
        if what is None and text and any(opening.startswith(text) for opening, _ in firsts):
            return False
        end = at if what else len(self._held) - beginning_at_end(self._held, [opening for opening, _ in anywhere])
        loose = self._find_loose(end)
        if loose is not None:
            end, opening, what = loose, "", LOOSE
        parts.append(self._content(self._held[:end]))
        self._held = self._held[end + len(opening) if what else end :]
        if what is LOOSE:
            self.call = CallSection(LOOSE, self._tools, "")
        elif isinstance(what, CallFormat):
            self.call = CallSection(what, self._tools, opening)
            self._said, self._trims = True, False
        elif what is not None:
            self._section = what
            self._skip_blanks()
        return what is not None

    def _content(self, text: str) -> AnswerPart:
        """Say content."""
        if self._takes_loose:
            self._note_lines(text)
        part = self._said_part(PartKind.CONTENT, text)
        self._said = self._said or bool(part.text)
        return part

    def _note_lines(self, text: str) -> None:
        """Note how the last line of content begins."""
        *lines, last = (self._line + text).split("\n")
        for line in lines:
            self._in_fence ^= line.lstrip().startswith(FENCE)
        self._line = last.lstrip()[: len(FENCE)]

    def _find_loose(self, end: int) -> int | None:
        """Where a call without the template's markers may begin in the held text, before an index."""
        if not self._takes_loose or not self._begun:
            return None
        in_fence, start = self._in_fence, 0
        for number, line in enumerate(self._held[:end].split("\n")):
            whole = self._line + line if number == 0 else line
            indent = len(line) - len(line.lstrip())
            if not in_fence and line.lstrip()[:1] in LOOSE_MARKS and (number or not self._line):
                return start + indent
            in_fence ^= whole.lstrip().startswith(FENCE)
            start += len(line) + 1
        return None


class ThinkingFirst(Splitter):
    """Splits an answer whose constraint starts after its reasoning.

    Markers within the constrained answer are text. White space between reasoning and answer is dropped.
    """

    def __init__(self, marker: Marker) -> None:
        """marker: the constraint's; the text starts with its opening."""
        super().__init__()
        self._opening, self._closing = marker
        self._thinks, self._begun = True, False

    def _read(self, parts: list[AnswerPart]) -> bool:
        if not self._thinks:
            text, self._held = self._held if self._begun else self._held.lstrip(), ""
            self._begun = self._begun or bool(text)
            parts.append(AnswerPart(PartKind.CONTENT, text))
            return False
        if len(self._held) < len(self._opening):
            return False
        self._held, self._opening = self._held.removeprefix(self._opening), ""
        text, closed = self._up_to(self._closing)
        parts.append(AnswerPart(PartKind.REASONING, text))
        self._thinks = not closed
        return closed

    def _rest(self, held: str) -> AnswerPart:
        return AnswerPart(PartKind.REASONING, held.removeprefix(self._opening))

    def _in_content(self) -> bool | None:
        return self._begun
