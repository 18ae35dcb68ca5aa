"""Splits answers in the harmony format of gpt-oss: messages with a channel and a recipient.

Source: OpenAI, "OpenAI harmony response format" (developers.openai.com/cookbook/articles/openai-harmony).
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Self

from localllm.answer.call_section import CallSection
from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.tool_calls.call import Schema
from localllm.answer.tool_calls.formats import HARMONY, CallFormat
from localllm.engine.stream import beginning_at_end

ANALYSIS = "<|channel|>analysis<|message|>"

_START, _MESSAGE = "<|start|>", "<|message|>"
_FINAL = "<|channel|>final<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_COMMENTARY = "<|channel|>commentary "
_CALL = HARMONY.openings[0]
# How a header starts, also after the prompt's "<|start|>assistant".
_HEADERS = (_START, "<|channel|>", "to=")
_LONGEST_HEADER = 200  # of role, channel and recipient; longer ones are text


class HarmonySplitter:
    """Splits an answer by the headers of its messages.

    The channel "analysis" is reasoning. Messages to a function are tool calls if tools were offered. Everything else is
    content. All of them stream.
    """

    def __init__(self, tools: Mapping[str, Schema], starts_in_reasoning: bool, starts_in_call: bool = False) -> None:
        """tools: the schemas of arguments by name. starts_in_call: the prompt ends with a call's opening."""
        self._tools = tools
        self._held = ""
        self._header = ANALYSIS if starts_in_reasoning else ""
        self._inside = starts_in_reasoning  # in a message's body, not its header
        self.call = CallSection(HARMONY, tools, _CALL, from_prompt=True) if starts_in_call else None

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return the parts that are certain now, in order."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._read(parts):
            pass
        return [part for part in parts if part.text or part.deltas]

    def flush(self) -> list[AnswerPart]:
        """Return the rest at the end of the answer."""
        if self.call is not None:
            call, self.call = self.call, None
            return call.flush()
        held, self._held = self._held, ""
        part = self._part(held) if self._inside else AnswerPart(PartKind.CONTENT, held)
        self._inside = False
        return [part] if part.text else []

    def fork(self) -> Self:
        """A copy in the same state; not within a call."""
        return copy.copy(self)

    def _read(self, parts: list[AnswerPart]) -> bool:
        if self.call is not None:
            return self._read_call(self.call, parts)
        return self._read_body(parts) if self._inside else self._read_header(parts)

    def _read_call(self, call: CallSection, parts: list[AnswerPart]) -> bool:
        text, self._held = self._held, ""
        parts += call.push(text)
        if call.broken:
            parts += call.flush()
        self._held = call.rest
        if call.broken or call.closed:
            self.call, self._header, self._inside = None, "", call.broken
        return call.closed

    def _read_header(self, parts: list[AnswerPart]) -> bool:
        """Process a header. Returns False if more text is needed."""
        text = self._held.lstrip()
        if not any(start.startswith(text[: len(start)]) for start in _HEADERS):
            self._header, self._inside = "", True
            return True
        at = self._held.find(_MESSAGE)
        called = self._held.find(_CALL, 0, at if at >= 0 else None) if self._tools else -1
        if called >= 0:
            end = called + len(_CALL)
            self.call = CallSection(HARMONY, self._tools, self._held[:end])
            self._held = self._held[end:]
            return True
        if at >= 0:
            self._header, self._held = self._held[:at] + _MESSAGE, self._held[at + len(_MESSAGE) :]
            self._inside = True
        elif len(self._held) > _LONGEST_HEADER:
            parts.append(AnswerPart(PartKind.CONTENT, self._held))
            self._header, self._held, self._inside = "", "", True
        return self._inside

    def _read_body(self, parts: list[AnswerPart]) -> bool:
        found = [(at, end) for end in _ENDS if (at := self._held.find(end)) >= 0]
        at, end = min(found, default=(len(self._held) - beginning_at_end(self._held, _ENDS), ""))
        body, self._held = self._held[:at], self._held[at:] if end in ("", _START) else self._held[at + len(end) :]
        parts.append(self._part(body))
        self._inside = not end
        return bool(end)

    def _part(self, body: str) -> AnswerPart:
        """A part of the current message."""
        reasons = "<|channel|>analysis" in self._header and "to=" not in self._header
        return AnswerPart(PartKind.REASONING if reasons else PartKind.CONTENT, body)


def before_call(form: CallFormat) -> tuple[str, str]:
    """The markup before a call, in the form of before_answer."""
    if form is HARMONY:
        return f"{_COMMENTARY}{_CALL}", f"{_START}assistant{_COMMENTARY}"
    return "" if form.starts else form.openings[0], ""


def before_answer(reasoning: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The markup before an answer's content: without reasoning before it, and after reasoning."""
    if not reasoning or reasoning[0][0] != ANALYSIS:
        return "", ""
    return _FINAL, f"{_START}assistant{_FINAL}"
