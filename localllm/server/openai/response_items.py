"""The output items of a response, whole and as the events that build them up."""

import json
import secrets
from typing import Any

from localllm.errors import LocalLLMError
from localllm.server.answers import Answer, Piece
from localllm.server.errors import openai_error, status_of
from localllm.server.responses import sse

Item = dict[str, Any]

_PREFIXES = {"reasoning": "rs", "message": "msg"}


class ItemWriter:
    """Reasoning, then a message, then calls: opened, filled and closed one after the other."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open = ""
        self._text = ""
        self._sequence = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event, numbered."""
        self._sequence += 1
        return sse({"type": kind, "sequence_number": self._sequence - 1, **fields}, event=kind)

    def begin(self, response: Item) -> list[bytes]:
        """The events that every stream begins with, once."""
        if self._sequence:
            return []
        return [self.event(kind, response=response) for kind in ("response.created", "response.in_progress")]

    def progress(self, told: Item) -> bytes:
        """How far a request has come, in an event that OpenAI lacks."""
        return self.event("localllm.progress", progress=told)

    def error(self, error: LocalLLMError) -> bytes:
        """The event of an error."""
        told = openai_error(status_of(error), str(error))["error"]
        return self.event("error", **{name: told[name] for name in ("code", "message", "param")})

    def add_all(self, answer: Answer) -> None:
        """Make the items of a whole answer."""
        self.add(Piece(answer.content, answer.reasoning, tuple(answer.calls)))
        self.close()

    def add(self, piece: Piece) -> list[bytes]:
        """The events of a piece."""
        lines: list[bytes] = []
        if piece.reasoning:
            lines += self._fill("reasoning", piece.reasoning)
        if piece.content:
            lines += self._fill("message", piece.content)
        for call in piece.calls:
            lines += self._call(call.name, json.dumps(call.arguments, ensure_ascii=False))
        return lines

    def close(self) -> list[bytes]:
        """End the open item."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        item = self.items[-1]
        part = _part(kind, self._text)
        item |= {"content": [part], "status": "completed"}
        at = self._at(item)
        return [
            self.event(f"response.{part['type']}.done", **at, text=self._text, **_logprobs(kind)),
            self.event("response.content_part.done", **at, part=part),
            self.event("response.output_item.done", output_index=len(self.items) - 1, item=item),
        ]

    def _fill(self, kind: str, text: str) -> list[bytes]:
        lines: list[bytes] = []
        if self._open != kind:
            lines += self.close()
            lines += self._begin(kind)
        self._text += text
        at = self._at(self.items[-1])
        lines.append(self.event(f"response.{_part(kind, '')['type']}.delta", **at, delta=text, **_logprobs(kind)))
        return lines

    def _begin(self, kind: str) -> list[bytes]:
        self._open, self._text = kind, ""
        item: Item = {
            "type": kind,
            "id": f"{_PREFIXES[kind]}_{secrets.token_hex(12)}",
            "status": "in_progress",
            "content": [],
        }
        more: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
        item |= more
        self.items.append(item)
        return [
            self.event("response.output_item.added", output_index=len(self.items) - 1, item=dict(item)),
            self.event("response.content_part.added", **self._at(item), part=_part(kind, "")),
        ]

    def _call(self, name: str, arguments: str) -> list[bytes]:
        lines = self.close()
        item: Item = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": name,
            "arguments": arguments,
            "status": "completed",
        }
        self.items.append(item)
        at = {"item_id": item["id"], "output_index": len(self.items) - 1}
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            *lines,
            self.event("response.output_item.added", output_index=at["output_index"], item=begun),
            self.event("response.function_call_arguments.delta", **at, delta=arguments),
            self.event("response.function_call_arguments.done", **at, name=name, arguments=arguments),
            self.event("response.output_item.done", output_index=at["output_index"], item=item),
        ]

    def _at(self, item: Item) -> Item:
        return {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}


def _part(kind: str, text: str) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _logprobs(kind: str) -> Item:
    return {"logprobs": []} if kind == "message" else {}
