"""Formats shared by several of OpenAI's routes: errors, chunks, tool calls, effort, response format."""

import json
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from localllm.answer.event import Answer, AnswerEvent
from localllm.answer.tool_calls import ToolCall
from localllm.bounded_json import parsed
from localllm.engine.request import FinishReason
from localllm.server.answering import Writer
from localllm.server.bodies import Object, Sampled
from localllm.server.errors import TOO_LONG_OPENAI, ApiError, Refusal, kind_of
from localllm.server.json_body import ProtocolRoute
from localllm.server.openai.schema import Constrained
from localllm.server.openai.tools import ClientTool, RequestTools, custom_input
from localllm.server.service import RunningAnswers
from localllm.server.wire import Framed, TimedProgress, cache_written, sse, timings, usage

DONE = b"data: [DONE]\n\n"
_KINDS = {401: "authentication_error", 404: "not_found_error"}


class OpenAIRoute(ProtocolRoute):
    """A route of OpenAI's."""

    @staticmethod
    def error_body(refusal: Refusal) -> Object:
        code = "context_length_exceeded" if refusal.too_long else refusal.code
        message, kind = refusal.worded(TOO_LONG_OPENAI), kind_of(refusal.status, _KINDS)
        return {"error": {"message": message, "type": kind, "param": None, "code": code, **refusal.counts}}


class BareRoute(OpenAIRoute):
    """A route of OpenAI's without /v1, as llama-server has it: a prompt that is too long has llama-server's type."""

    @staticmethod
    def error_body(refusal: Refusal) -> Object:
        body = OpenAIRoute.error_body(refusal)
        if refusal.too_long:
            body["error"]["type"] = "exceed_context_size_error"
        return body


class ChunkWriter(Writer):
    """The common part of the writers of chat completions and completions."""

    route = OpenAIRoute

    def __init__(self, body: Sampled, prefix: str, kind: str) -> None:
        self._includes_usage = body.stream_options is not None and body.stream_options.include_usage
        self._body = body
        self._timed = TimedProgress(body.return_progress)
        self._contents: dict[int, Framed] = {}  # by index, chunks of nothing but an answer's text
        self._fixed = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}

    @property
    def _head(self) -> Object:
        return {**self._fixed, "model": self._body.model, "system_fingerprint": "fp_localllm"}

    def progress(self, progress: Object) -> bytes:
        return sse({**self._head, "choices": [], "progress": progress, **self._timed.fields(progress)})

    def end(self, run: RunningAnswers) -> Iterator[bytes]:
        if self._includes_usage:
            yield sse({**self._head, "choices": [], **self._totals(run)})
        yield DONE

    def event(self, run: RunningAnswers, index: int, event: AnswerEvent) -> Iterable[bytes]:
        text = None if self._body.timings_per_token else event.only_content
        if text is None:
            return self._chunks(run, index, event)
        framed = self._contents.get(index) or self._contents.setdefault(index, Framed(partial(self._content, index)))
        return (framed.line(text),)

    @abstractmethod
    def _content(self, index: int, text: str) -> bytes:
        """A chunk of nothing but an answer's text."""

    @abstractmethod
    def _chunks(self, run: RunningAnswers, index: int, event: AnswerEvent) -> Iterable[bytes]:
        """The chunks of any event."""

    def _timings(self, event: AnswerEvent, is_last: bool = False) -> Object:
        """The timings of a chunk: as llama-server's, in a choice's last one, or in the one with usage, or in all."""
        told = self._body.timings_per_token or (is_last and not self._includes_usage)
        return {"timings": timings(event)} if told else {}

    def _totals(self, run: RunningAnswers) -> Object:
        """Usage of all choices, and timings of the first."""
        return {"usage": self._usage(run), "timings": timings(run.answers[0].last)}

    def _usage(self, run: RunningAnswers) -> Object:
        reasoning = sum(answer.reasoning_tokens for answer in run.answers)
        details = {"completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else {}
        return usage(run.answers, run.choices) | details


def item_usage(answer: Answer) -> Object:
    """The token counts of an answer as /v1/responses names them."""
    counts = answer.last.counts
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, **cache_written(counts)},
        "output_tokens": counts.generated,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": counts.prompt + counts.generated,
    }


def called(call: ToolCall, tool: ClientTool) -> Object:
    """A tool call with a new id: arguments as JSON text, or a custom tool's input."""
    identity = {"id": f"call_{secrets.token_hex(12)}"}
    if tool.is_custom:
        return {**identity, "type": "custom", "custom": {"name": tool.name, "input": custom_input(call)}}
    return {**identity, "type": "function", "function": function_of(call)}


class CallDeltas:
    """The tool calls of one streamed answer as its chunks report them; calls of custom tools once they are complete."""

    def __init__(self, tools: RequestTools) -> None:
        self._tools = tools
        self._names: list[str] = []
        self._complete = 0

    def of(self, event: AnswerEvent) -> list[Object]:
        """The calls' parts that an event adds, one entry for each call."""
        found: dict[int, Object] = {}
        for part in event.parts:
            for delta in part.deltas:
                if delta.name:
                    self._names.append(delta.name)
                index = len(self._names) - 1
                if self._tools.client_tool(self._names[index]).is_custom:
                    continue
                if delta.name:
                    begun = called(ToolCall(delta.name, {}), ClientTool(delta.name))
                    begun["function"]["arguments"] = ""
                    found[index] = {"index": index, **begun}
                entry = found.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += delta.arguments
            for call in part.tool_calls:
                tool = self._tools.client_tool(call.name)
                if tool.is_custom:
                    found[self._complete] = {"index": self._complete, **called(call, tool)}
                self._complete += 1
        return list(found.values())


def function_of(call: ToolCall) -> Object:
    return {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}


def finish_reason(answer: Answer) -> str:
    if answer.calls and not answer.last.is_cut_call:
        return "tool_calls"
    return "length" if answer.last.finish_reason is FinishReason.LENGTH else "stop"


def think_of(effort: str | None) -> bool | str | None:
    """The `think` field for a reasoning effort."""
    return False if effort == "none" else effort


def constraint_of(body: Constrained) -> Object:
    """The fields `format` and `grammar` of an AnswerRequest. Raises ApiError 400."""
    guided = body.guided_json
    given = {
        "response_format": format_of(body.response_format),
        "json_schema": None if body.response_format else body.json_schema,  # some clients send both
        "guided_json": _parsed(guided) if isinstance(guided, str) else guided,
        "grammar": _grammar("gbnf", body.grammar or body.guided_grammar),
        "guided_regex": _grammar("regex", body.guided_regex),
        "guided_choice": _grammar("gbnf", _choices(body.guided_choice or ())),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) > 1:
        raise ApiError(400, f"{' and '.join(found)} exclude each other; send one of them")
    for value in found.values():
        return {"grammar": value} if isinstance(value, tuple) else {"format": value}
    return {}


def _grammar(kind: str, source: str | None) -> tuple[str, str] | None:
    return (kind, source) if source else None


def _choices(texts: Sequence[str]) -> str:
    """A grammar of these texts; "" if there are none. Its strings have JSON's escapes, except of other scripts."""
    spelt = [json.dumps(text, ensure_ascii=False) for text in texts]
    return f"root ::= {' | '.join(spelt)}" if spelt else ""


def _parsed(schema: str) -> Any:
    try:
        found = parsed(schema)
    except ValueError as error:
        raise ApiError(400, f"guided_json cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ApiError(400, "guided_json must be a JSON Schema")
    return found


def format_of(given: Any) -> Any:
    """The format of a `response_format`, or of the `text.format` of responses. Raises ApiError 400.

    llama.cpp's form, type json_object with a schema, is accepted too.
    """
    if given is None:
        return None
    response_format: Object = given if isinstance(given, dict) else {"type": None}
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object" and response_format.get("schema") is None:
        return "json"
    holder = response_format.get("json_schema", response_format)
    is_schema = kind in ("json_schema", "json_object") and isinstance(holder, dict)
    if not is_schema or not isinstance(holder.get("schema"), dict):
        raise ApiError(400, "response_format must be of type text, json_object, or json_schema with a schema")
    return holder["schema"]
