"""Tool calls as they stream: a name first, then the JSON of the arguments in pieces, each call with its index."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from localllm.engine.answer_parts import AnswerPart, PartKind
from localllm.engine.tool_calls import ToolCall


class CallBuilder:
    """Puts one answer's calls together. A call is complete when the next one begins, or the answer ends."""

    def __init__(self) -> None:
        self._index: int | None = None
        self._name = ""
        self._arguments = ""

    def push(self, deltas: Iterable[Mapping[str, Any]]) -> list[AnswerPart]:
        """Add pieces; return the calls that are complete by now."""
        parts: list[AnswerPart] = []
        for delta in deltas:
            index = delta.get("index", 0)
            if index != self._index:
                parts += self.flush()
                self._index = index
            function = delta.get("function") or {}
            self._name += function.get("name") or ""
            arguments = function.get("arguments") or ""
            self._arguments += arguments if isinstance(arguments, str) else json.dumps(arguments)
        return parts

    def flush(self) -> list[AnswerPart]:
        """Return the call that is still open. One whose arguments are no JSON object becomes content."""
        index, name, source = self._index, self._name, self._arguments
        self._index, self._name, self._arguments = None, "", ""
        if index is None:
            return []
        try:
            arguments = json.loads(source or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict) or not name:
            return [AnswerPart(PartKind.CONTENT, f"{name} {source}")]
        return [AnswerPart(PartKind.TOOL_CALLS, f"{name} {source}", (ToolCall(name, arguments),))]
