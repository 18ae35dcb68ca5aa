"""Splitting an answer's text into content, reasoning and tool calls while it streams.

Nothing is lost but the markers, and the white space between them and what they enclose or separate.
"""

from collections.abc import Sequence
from typing import Protocol

from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.harmony import ANALYSIS, HarmonySplitter
from localllm.answer.tool_calls import parse_tool_calls
from localllm.engine.detokenizer import beginning_at_end

# Opening and closing marker, as in ChatTemplate; a closing "" is the end of the answer.
Marker = tuple[str, str]


class Splitter(Protocol):
    """Splits an answer."""

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return the parts that are certain now, in order."""

    def flush(self) -> list[AnswerPart]:
        """Return the rest at the end of the answer."""


def answer_splitter(
    reasoning: Sequence[Marker], tool_calls: Sequence[Marker] = (), starts_in_reasoning: bool = False
) -> Splitter:
    """A splitter for a template with these markers. For the arguments see AnswerSplitter."""
    if any(opening == ANALYSIS for opening, _ in reasoning):
        return HarmonySplitter(bool(tool_calls), starts_in_reasoning)
    return AnswerSplitter(reasoning, tool_calls, starts_in_reasoning)


class AnswerSplitter:
    """Splits an answer by its template's markers, which are left out.

    Reasoning and content stream; a tool call is returned when it is complete, or as content with its markers if it
    cannot be parsed. Reasoning is only recognised at the beginning of an answer; a later marker is text. White space
    is left out at both ends of reasoning, and where content meets reasoning or a call.
    """

    def __init__(
        self, reasoning: Sequence[Marker], tool_calls: Sequence[Marker] = (), starts_in_reasoning: bool = False
    ) -> None:
        """reasoning, tool_calls: ChatTemplate's markers; no tool_calls if the request offers no tools."""
        self._kinds = dict.fromkeys(tool_calls, PartKind.TOOL_CALLS)
        self._kinds |= dict.fromkeys(reasoning, PartKind.REASONING)
        self._reasoning = list(reasoning)
        self._tool_calls = list(tool_calls)
        self._section: Marker | None = reasoning[0] if starts_in_reasoning and reasoning else None
        self._begun = False  # whether there was content other than white space
        self._held = ""
        self._call: list[str] = []  # an unfinished call
        self._trims = False  # whether white space that comes next is left out
        self._blank = ""  # white space after content, until it is known what comes

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return the parts that are certain now, in order."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return [part for part in parts if part.text]

    def flush(self) -> list[AnswerPart]:
        """Return what is still held when the answer ends."""
        held, section, self._held, self._section = self._held, self._section, "", None
        if section is not None and self._kinds[section] is PartKind.TOOL_CALLS:
            part = self._called(section[0], "".join([*self._call, held]), "")
        elif section is not None:
            part = AnswerPart(PartKind.REASONING, self._trimmed(held).rstrip())
        else:
            part = AnswerPart(PartKind.CONTENT, self._trimmed(self._blank + held))
        return [part] if part.text else []

    def _trimmed(self, text: str) -> str:
        """The text, without white space at its beginning after a marker."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Process the text up to the next marker. Returns False if more text is needed."""
        if self._section is None:
            return self._read_content(parts)
        opening, closing = self._section
        reasons = self._kinds[self._section] is PartKind.REASONING
        at = self._held.find(closing) if closing else -1
        end = at if at >= 0 else len(self._held) - beginning_at_end(self._held, [closing])
        if reasons and at < 0:
            end = len(self._held[:end].rstrip())
        body, self._held = self._held[:end], self._held[end:]
        if reasons:
            parts.append(AnswerPart(PartKind.REASONING, self._trimmed(body.rstrip())))
        else:
            self._call.append(body)
        if at < 0:
            return False
        if self._kinds[self._section] is PartKind.TOOL_CALLS:
            parts.append(self._called(opening, "".join(self._call), closing))
            self._call.clear()
        else:
            self._trims = True
        self._held = self._held[len(closing) :]
        self._section = None
        return True

    def _called(self, opening: str, body: str, closing: str) -> AnswerPart:
        """The calls between two markers; content with the white space before it if they cannot be parsed."""
        part, blank, self._blank = _call(opening, body, closing), self._blank, ""
        self._trims = bool(part.tool_calls)
        return part if part.tool_calls else AnswerPart(PartKind.CONTENT, blank + part.text)

    def _read_content(self, parts: list[AnswerPart]) -> bool:
        text = self._held.lstrip()
        self._begun = self._begun or not any(opening.startswith(text[: len(opening)]) for opening, _ in self._reasoning)
        markers = self._tool_calls if self._begun else self._reasoning + self._tool_calls
        found = [(self._held.find(marker[0]), -len(marker[0]), marker) for marker in markers]
        found = [entry for entry in found if entry[0] >= 0]
        at, _, section = min(found, default=(-1, 0, None))
        openings = [opening for opening, _ in markers]
        end = at if section else len(self._held) - beginning_at_end(self._held, openings)
        content = self._trimmed(self._blank + self._held[:end])
        said = content.rstrip()
        self._blank = content[len(said) :]
        if section is not None and self._kinds[section] is PartKind.REASONING:
            self._trims, self._blank = True, ""
        parts.append(AnswerPart(PartKind.CONTENT, said))
        self._held = self._held[end + len(section[0]) if section else end :]
        self._section = section
        return section is not None


def _call(opening: str, body: str, closing: str) -> AnswerPart:
    calls = parse_tool_calls(opening, body)
    source = opening + body + closing
    return AnswerPart(PartKind.TOOL_CALLS, source, calls) if calls else AnswerPart(PartKind.CONTENT, source)


class ForcedCall:
    """Reads an answer that is constrained to a tool call {"name": ..., "arguments": ...}; returned when complete."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def push(self, text: str) -> list[AnswerPart]:
        """Keep the text."""
        self._text.append(text)
        return []

    def flush(self) -> list[AnswerPart]:
        """The call, or content if the answer was cut off."""
        text = "".join(self._text)
        calls = parse_tool_calls("", text)
        kind = PartKind.TOOL_CALLS if calls else PartKind.CONTENT
        return [AnswerPart(kind, text, calls)] if text else []


class ThinkingFirst:
    """Splits an answer whose constraint starts after its reasoning.

    Markers within the constrained answer are text. White space between reasoning and answer is dropped.
    """

    def __init__(self, marker: Marker, answer: Splitter | None = None) -> None:
        """marker: the constraint's, so the text starts with the opening. answer: splits the rest."""
        self._opening, self._closing = marker
        self._answer = answer
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
        return self._answer.flush() if self._answer else []

    def _content(self, text: str) -> list[AnswerPart]:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return self._answer.push(text) if self._answer else _part(PartKind.CONTENT, text)


def _part(kind: PartKind, text: str) -> list[AnswerPart]:
    return [AnswerPart(kind, text)] if text else []
