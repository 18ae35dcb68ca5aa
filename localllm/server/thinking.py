"""Answers that think first and then keep to a format: one section of reasoning, and everything after it is content."""

from localllm.engine.answer_parts import AnswerPart, Marker, PartKind
from localllm.engine.detokenizer import beginning_at_end
from localllm.server.answers import Splitter


class ThinkingFirst:
    """Splits an answer whose constraint begins behind its reasoning; stands where an AnswerSplitter would.

    Markers within the formatted answer are its own text. Blanks between the reasoning and the answer belong to neither.
    """

    def __init__(self, marker: Marker, answer: Splitter | None = None) -> None:
        """marker: as the constraint has it, so that the text begins with the opening. answer: reads what follows."""
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
            return _reasoning(thoughts[:certain])
        self._thinks, self._held = False, ""
        return [*_reasoning(thoughts[:at]), *self._content(thoughts[at + len(self._closing) :])]

    def flush(self) -> list[AnswerPart]:
        """Return what is still held when the answer ends."""
        if self._thinks:
            return _reasoning(self._held.removeprefix(self._opening))
        return self._answer.flush() if self._answer else []

    def _content(self, text: str) -> list[AnswerPart]:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        if self._answer:
            return self._answer.push(text)
        return [AnswerPart(PartKind.CONTENT, text)] if text else []


def _reasoning(text: str) -> list[AnswerPart]:
    return [AnswerPart(PartKind.REASONING, text)] if text else []
