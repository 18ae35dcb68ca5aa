"""Answers in the harmony format of gpt-oss: messages with a channel and a recipient.

Source: OpenAI, "OpenAI harmony response format" (developers.openai.com/cookbook/articles/openai-harmony).
"""

import re
from collections.abc import Sequence

from localllm.answer.event import AnswerPart, PartKind
from localllm.answer.tool_calls import parse_tool_calls
from localllm.engine.detokenizer import beginning_at_end

ANALYSIS = "<|channel|>analysis<|message|>"

_START, _MESSAGE = "<|start|>", "<|message|>"
_FINAL = "<|channel|>final<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_RECIPIENT = re.compile(r"to=functions\.(?P<name>[\w.-]+)")
# How a header starts, also after the prompt's "<|start|>assistant".
_HEADERS = (_START, "<|channel|>", "to=")
_LONGEST_HEADER = 200  # of role, channel and recipient; longer ones are text


class HarmonySplitter:
    """Splits an answer by the headers of its messages.

    The channel "analysis" is reasoning. Messages to a function are tool calls if tools were offered. Everything else is
    content. Reasoning and content stream.
    """

    def __init__(self, offers_tools: bool, starts_in_reasoning: bool) -> None:
        self._offers_tools = offers_tools
        self._held = ""
        self._header = ANALYSIS if starts_in_reasoning else ""
        self._inside = starts_in_reasoning  # in a message's body, not its header
        self._call: list[str] = []  # an unfinished call

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return the parts that are certain now, in order."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._read_body(parts) if self._inside else self._read_header(parts):
            pass
        return [part for part in parts if part.text]

    def flush(self) -> list[AnswerPart]:
        """Return the rest at the end of the answer."""
        held, self._held = "".join([*self._call, self._held]), ""
        part = self._part(held) if self._inside else AnswerPart(PartKind.CONTENT, held)
        self._inside = False
        return [part] if part.text else []

    def _read_header(self, parts: list[AnswerPart]) -> bool:
        """Process a header. Returns False if more text is needed."""
        text = self._held.lstrip()
        if not any(start.startswith(text[: len(start)]) for start in _HEADERS):
            self._header, self._inside = "", True
            return True
        at = self._held.find(_MESSAGE)
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
        if self._calls:
            self._call.append(body)
            if end:
                parts.append(self._part("".join(self._call)))
                self._call.clear()
        else:
            parts.append(self._part(body))
        self._inside = not end
        return bool(end)

    @property
    def _calls(self) -> bool:
        return self._offers_tools and _RECIPIENT.search(self._header) is not None

    def _part(self, body: str) -> AnswerPart:
        """A part of the current message, or a whole call."""
        recipient = _RECIPIENT.search(self._header)
        if recipient is None or not self._offers_tools:
            reasons = "<|channel|>analysis" in self._header and recipient is None
            return AnswerPart(PartKind.REASONING if reasons else PartKind.CONTENT, body)
        calls = parse_tool_calls("", f"{recipient['name']} {body}")
        source = self._header + body
        return AnswerPart(PartKind.TOOL_CALLS, source, calls) if calls else AnswerPart(PartKind.CONTENT, source)


def before_answer(reasoning: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The markup before an answer's content: without reasoning before it, and after reasoning."""
    if not reasoning or reasoning[0][0] != ANALYSIS:
        return "", ""
    return _FINAL, f"{_START}assistant{_FINAL}"
