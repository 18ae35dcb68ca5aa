"""An answer's text split into content, reasoning and tool calls while it streams. No text is ever lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from localllm.engine.detokenizer import beginning_at_end
from localllm.engine.tool_calls import ToolCall, parse_tool_calls

# Opening and closing texts, as ChatTemplate names them; a closing "" is the end of the answer.
Marker = tuple[str, str]


class PartKind(StrEnum):
    """What a piece of an answer is."""

    CONTENT = "content"
    REASONING = "reasoning"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer. tool_calls are set for PartKind.TOOL_CALLS alone, whose text is the source of the calls."""

    kind: PartKind
    text: str
    tool_calls: tuple[ToolCall, ...] = ()


class AnswerSplitter:
    """Splits one answer by its template's markers, which are left out of the text.

    Reasoning and content stream; a tool call comes when it is complete. A call that cannot be understood is content,
    markers included. An answer begins with its reasoning or has none: a marker of it further on is text about markers.
    """

    def __init__(
        self, reasoning: Sequence[Marker], tool_calls: Sequence[Marker] = (), starts_in_reasoning: bool = False
    ) -> None:
        """tool_calls: leave them out where the request offered no tools. Markers as ChatTemplate gives them."""
        self._kinds = dict.fromkeys(tool_calls, PartKind.TOOL_CALLS)
        self._kinds |= dict.fromkeys(reasoning, PartKind.REASONING)
        self._reasoning = list(reasoning)
        self._tool_calls = list(tool_calls)
        self._section: Marker | None = reasoning[0] if starts_in_reasoning and reasoning else None
        self._begun = False  # whether content, other than blanks, has come
        self._held = ""
        self._call: list[str] = []  # what has come of a call

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
        if section is None:
            part = AnswerPart(PartKind.CONTENT, held)
        elif self._kinds[section] is PartKind.REASONING:
            part = AnswerPart(PartKind.REASONING, held)
        else:
            part = _call(section[0], "".join([*self._call, held]), "")
        return [part] if part.text else []

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Handle the text up to the next marker; False once more text is needed."""
        if self._section is None:
            return self._read_content(parts)
        opening, closing = self._section
        at = self._held.find(closing) if closing else -1
        end = at if at >= 0 else len(self._held) - beginning_at_end(self._held, [closing])
        body, self._held = self._held[:end], self._held[end:]
        if self._kinds[self._section] is PartKind.REASONING:
            parts.append(AnswerPart(PartKind.REASONING, body))
        else:
            self._call.append(body)
        if at < 0:
            return False
        if self._kinds[self._section] is PartKind.TOOL_CALLS:
            parts.append(_call(opening, "".join(self._call), closing))
            self._call.clear()
        self._held = self._held[len(closing) :]
        self._section = None
        return True

    def _read_content(self, parts: list[AnswerPart]) -> bool:
        text = self._held.lstrip()
        self._begun = self._begun or not any(opening.startswith(text[: len(opening)]) for opening, _ in self._reasoning)
        markers = self._tool_calls if self._begun else self._reasoning + self._tool_calls
        found = [(self._held.find(marker[0]), -len(marker[0]), marker) for marker in markers]
        found = [entry for entry in found if entry[0] >= 0]
        at, _, section = min(found, default=(-1, 0, None))
        openings = [opening for opening, _ in markers]
        end = at if section else len(self._held) - beginning_at_end(self._held, openings)
        parts.append(AnswerPart(PartKind.CONTENT, self._held[:end]))
        self._held = self._held[end + len(section[0]) if section else end :]
        self._section = section
        return section is not None


def _call(opening: str, body: str, closing: str) -> AnswerPart:
    calls = parse_tool_calls(opening, body)
    source = opening + body + closing
    return AnswerPart(PartKind.TOOL_CALLS, source, calls) if calls else AnswerPart(PartKind.CONTENT, source)
