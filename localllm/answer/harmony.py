"""Splits answers in the harmony format of gpt-oss: messages with a channel and a recipient.

Source: OpenAI, "OpenAI harmony response format" (developers.openai.com/cookbook/articles/openai-harmony).
"""

from collections.abc import Mapping, Sequence

from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.splitter import CallSection, Splitter
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


class HarmonySplitter(Splitter):
    """Splits an answer by the headers of its messages.

    The channel "analysis" is reasoning. Messages to a function are tool calls if tools were offered. Everything else is
    content. All of them stream.
    """

    def __init__(self, tools: Mapping[str, Schema], starts_in_reasoning: bool, starts_in_call: bool = False) -> None:
        """tools: the schemas of arguments by name. starts_in_call: the prompt ends with a call's opening."""
        super().__init__()
        self._tools = tools
        self._header = ANALYSIS if starts_in_reasoning else ""
        self._inside = starts_in_reasoning  # in a message's body, not its header
        self._is_new = False  # whether nothing of the current message was read yet
        self._spoken: set[PartKind] = set()  # the kinds of parts that there were
        if starts_in_call:
            self.call = CallSection(HARMONY, tools, _CALL, from_prompt=True)

    def _read(self, parts: list[AnswerPart]) -> bool:
        return self._read_body(parts) if self._inside else self._read_header(parts)

    def _rest(self, held: str) -> AnswerPart:
        return self._part(held) if self._inside else AnswerPart(PartKind.CONTENT, held)

    def _ended_call(self, call: CallSection) -> list[AnswerPart]:
        self._header, self._inside, self._is_new = "", True, True
        return super()._ended_call(call)

    def _in_content(self) -> bool | None:
        if self._inside:
            return self._kind is PartKind.CONTENT
        text = self._held.lstrip()
        return False if any(text.startswith(start) for start in _HEADERS) else None

    def _read_header(self, parts: list[AnswerPart]) -> bool:
        """Process a header. Returns False if more text is needed."""
        text = self._held.lstrip()
        if not any(start.startswith(text[: len(start)]) for start in _HEADERS):
            self._header, self._inside, self._is_new = "", True, True
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
            self._inside = self._is_new = True
        elif len(self._held) > _LONGEST_HEADER:
            parts.append(AnswerPart(PartKind.CONTENT, self._held))
            self._header, self._held, self._inside, self._is_new = "", "", True, False
        return self._inside

    def _read_body(self, parts: list[AnswerPart]) -> bool:
        found = [(at, end) for end in _ENDS if (at := self._held.find(end)) >= 0]
        at, end = min(found, default=(len(self._held) - beginning_at_end(self._held, _ENDS), ""))
        body, self._held = self._held[:at], self._held[at:] if end in ("", _START) else self._held[at + len(end) :]
        parts.append(self._part(body))
        self._inside = not end
        return bool(end)

    @property
    def _kind(self) -> PartKind:
        """The kind of the current message."""
        reasons = "<|channel|>analysis" in self._header and "to=" not in self._header
        return PartKind.REASONING if reasons else PartKind.CONTENT

    def _part(self, body: str) -> AnswerPart:
        """A part of the current message; a newline separates it from the message of its kind before it."""
        kind = self._kind
        if body:
            if self._is_new and kind in self._spoken and not body[0].isspace():
                body = f"\n{body}"
            self._is_new = False
            self._spoken.add(kind)
        return AnswerPart(kind, body)


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
