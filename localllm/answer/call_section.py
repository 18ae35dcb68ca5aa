"""Turns a section of tool calls into parts of an answer."""

from collections.abc import Mapping

from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.tool_calls import CallDelta, CallFormat, CallReader, ToolCall
from localllm.answer.tool_calls.call import Schema


class CallSection:
    """Makes parts of what a CallReader finds. has_calls: whether any call is complete. The rest is the reader's."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Schema], opening: str, from_prompt: bool = False) -> None:
        """opening: the text that opened the section. from_prompt: the prompt ends with it."""
        self.form = form
        self.opening = opening
        self.has_calls = False
        self._reader = CallReader(form, tools, opening)
        self._begun = False  # whether a call has a name, and no end yet
        self._unsent = "" if from_prompt else opening

    @property
    def closed(self) -> bool:
        return self._reader.closed

    @property
    def broken(self) -> bool:
        return self._reader.broken

    @property
    def rest(self) -> str:
        return self._reader.rest

    @property
    def written(self) -> str:
        """The section's text since the last complete call, with its opening."""
        return self._reader.source

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return the new parts of calls."""
        found = self._reader.push(text)
        self._unsent += text.removesuffix(self.rest) if self.rest else text
        for one in found:
            self._begun = isinstance(one, CallDelta)
            self.has_calls = self.has_calls or not self._begun
        if not found and not self.closed:
            return []
        sent, self._unsent = self._unsent, ""
        calls = tuple(one for one in found if isinstance(one, ToolCall))
        return [AnswerPart(PartKind.TOOL_CALLS, sent, calls, tuple(one for one in found if isinstance(one, CallDelta)))]

    def flush(self) -> list[AnswerPart]:
        """What is left when the section does not continue: an unfinished call, or content."""
        if self._begun:
            return [AnswerPart(PartKind.TOOL_CALLS, self._unsent, unfinished=self._reader.source)]
        if self.has_calls and not self._unsent.strip():
            return []
        return [AnswerPart(PartKind.CONTENT, self._unsent)]
