"""What all splitters of answers share: text that is held, and sections of tool calls."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.tool_calls import CallDelta, CallFormat, CallReader, ToolCall
from localllm.answer.tool_calls.call import Schema
from localllm.engine.stream import beginning_at_end


class CallSection(CallReader):
    """Reads a section of tool calls and makes parts of an answer of them. has_calls: whether any call is complete."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Schema], opening: str, from_prompt: bool = False) -> None:
        """opening: the text that opened the section. from_prompt: the prompt ends with it."""
        super().__init__(form, tools, opening)
        self.has_calls = False
        self._begun = False  # whether a call has a name, and no end yet
        self._from_prompt = from_prompt
        self._first = self._unsent = "" if from_prompt else opening

    @property
    def is_call(self) -> bool:
        """Whether the section is certain to be one of calls: at least one has a name."""
        return self._begun or self.has_calls

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return the new parts of calls."""
        found = self.read(text)
        self._unsent += text.removesuffix(self.rest) if self.closed else text
        for one in found:
            self._begun = isinstance(one, CallDelta)
            self.has_calls = self.has_calls or not self._begun
        if not found and not self.closed:
            return []
        left = self.rest if self.broken else ""
        if isinstance(found[-1] if found else None, ToolCall) and not self.closed:
            left = self.source  # what follows the call may be text
        sent, self._unsent = self._unsent.removesuffix(left), left
        calls = tuple(one for one in found if isinstance(one, ToolCall))
        return [AnswerPart(PartKind.TOOL_CALLS, sent, calls, tuple(one for one in found if isinstance(one, CallDelta)))]

    def flush(self) -> list[AnswerPart]:
        """What is left when the section does not continue: an unfinished call, or content."""
        if self._begun:
            return [AnswerPart(PartKind.TOOL_CALLS, self._unsent, unfinished=self.source)]
        if self.has_calls and not self._unsent.strip():
            return []
        return [AnswerPart(PartKind.CONTENT, self._unsent)]

    def give_up(self) -> tuple[list[AnswerPart], str]:
        """For a broken section: what is certain of it, and the text after that, which is to be read again."""
        if self._begun:
            text, source = (one.removesuffix(self.rest) for one in (self._unsent, self.source))
            return [AnswerPart(PartKind.TOOL_CALLS, text, unfinished=source)], self.rest
        if self.has_calls:
            return [], self._unsent
        first = self._first or self._unsent[: not self._from_prompt]
        return [AnswerPart(PartKind.CONTENT, first)], self._unsent[len(first) :]


class AnswerScope:
    """Stop strings count in an answer's content, not in its reasoning, its calls or its markup.

    Implements engine.request.StopScope.
    """

    def __init__(self, splitter: "Splitter") -> None:
        """splitter: for this answer, and not in use elsewhere."""
        self._splitter = splitter
        self._undecided = ""

    def feed(self, text: str) -> list[tuple[str, bool]]:
        found: list[tuple[str, bool]] = []
        for character in text:  # one by one, to find where the answer changes from one part to another
            self._splitter.push(character)
            self._undecided += character
            counts = self._splitter.in_content
            if counts is None:
                continue
            if found and found[-1][1] == counts:
                found[-1] = found[-1][0] + self._undecided, counts
            else:
                found.append((self._undecided, counts))
            self._undecided = ""
        return found


class Splitter(ABC):
    """Splits an answer's text into parts while it streams. call: the section of tool calls that is open."""

    def __init__(self) -> None:
        self.call: CallSection | None = None
        self._held = ""

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return the parts that are certain now, in order."""
        self._held += text
        parts: list[AnswerPart] = []
        more = True
        while more:
            more = self._read(parts) if self.call is None else self._read_call(self.call, parts)
        return [part for part in parts if part.text or part.deltas]

    @property
    def in_content(self) -> bool | None:
        """Whether the text so far ends within content. None if more text is needed to tell."""
        if self.call is not None:
            return False if self.call.is_call else None
        return self._in_content()

    def flush(self) -> list[AnswerPart]:
        """Return the rest at the end of the answer."""
        if self.call is not None:
            return self._ended_call(self.call)
        rest, self._held = self._rest(self._held), ""
        return [rest] if rest.text else []

    def _read_call(self, call: CallSection, parts: list[AnswerPart]) -> bool:
        text, self._held = self._held, ""
        parts += call.push(text)
        if call.broken:
            parts += self._ended_call(call)
        elif call.closed:
            self.call, self._held = None, call.rest
        return call.closed or call.broken

    def _ended_call(self, call: CallSection) -> list[AnswerPart]:
        """What is left of a section of calls that does not continue."""
        self.call = None
        if not call.broken:
            return call.flush()
        parts, self._held = call.give_up()
        return parts

    def _up_to(self, marker: str) -> tuple[str, bool]:
        """Take the held text before a marker, and the marker, if it is there; else what cannot be a part of it."""
        at = self._held.find(marker)
        end = at if at >= 0 else len(self._held) - beginning_at_end(self._held, [marker])
        text, self._held = self._held[:end], self._held[end + len(marker) if at >= 0 else end :]
        return text, at >= 0

    @abstractmethod
    def _read(self, parts: list[AnswerPart]) -> bool:
        """Add the parts of the held text up to the next marker. Returns False if more text is needed."""

    @abstractmethod
    def _in_content(self) -> bool | None:
        """See in_content; outside of calls."""

    @abstractmethod
    def _rest(self, held: str) -> AnswerPart:
        """The part that the held text is, since the answer ends."""
