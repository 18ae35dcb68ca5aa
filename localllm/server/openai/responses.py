"""/v1/responses, without memory: the conversation is what the request brings."""

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from localllm.answer.request import AnswerRequest
from localllm.engine.request import ContextPolicy
from localllm.server.answering import answer
from localllm.server.bodies import keep_alive_s
from localllm.server.contents import TEXT_ONLY, openai_content, openai_text
from localllm.server.errors import ApiError
from localllm.server.openai.response_writer import ResponseWriter
from localllm.server.openai.schema import ResponsesBody
from localllm.server.openai.wire import Object, OpenAIRoute, format_of, think_of, tool_choice_of
from localllm.server.service import ServiceDep

router = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])

_SAID = ("content", "reasoning_content", "tool_calls")
STATEFUL = ("previous_response_id", "conversation", "background")


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request, service: ServiceDep) -> Response:
    """Answer a conversation."""
    asked = await to_thread.run_sync(responses_request, body)
    return await answer(
        request,
        service,
        body.model,
        [asked],
        ResponseWriter(body),
        stream=bool(body.stream),
        progress=body.progress,
        keep_alive_s=keep_alive_s(body.keep_alive),
    )


def responses_request(body: ResponsesBody) -> AnswerRequest:
    """A body as a request. Decodes images: off the event loop.

    Raises ApiError 400, also for what would need memory, and PictureError.
    """
    for name in STATEFUL:
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported: responses are not stored; send the whole conversation")
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages += _joined([_message(item) for item in given])
    if not given or given == [{"role": "user", "content": ""}]:
        raise ApiError(400, "input is empty")
    fields = body.request_fields(None)
    if body.truncation == "auto":
        fields["policy"] = ContextPolicy.DROP_MESSAGES
    return AnswerRequest(
        messages=messages,
        tools=[] if body.tool_choice == "none" else [_tool(tool) for tool in body.tools or []],
        tool_choice=tool_choice_of(body.tool_choice),
        think=think_of(body.reasoning.effort if body.reasoning else None),
        format=format_of((body.text or {}).get("format")),
        max_tokens=body.max_output_tokens,
        **fields,
    )


def _joined(messages: list[Object]) -> list[Object]:
    """The messages, those of one turn of the assistant's as one: its reasoning, text and calls are items apart."""
    found: list[Object] = []
    for message in messages:
        before = found[-1] if found else {}
        same_turn = message["role"] == before.get("role") == "assistant"
        if not same_turn or (message["content"] and (before["content"] or "tool_calls" in before)):
            found.append(message)
            continue
        before["content"] = before["content"] or message["content"]
        for key in ("reasoning_content", "tool_calls"):
            if key in message:
                before[key] = before[key] + message[key] if key in before else message[key]
    return [message for message in found if message["role"] != "assistant" or any(map(message.get, _SAID))]


def _message(item: Object) -> Object:
    """An input item as a message."""
    kind = item.get("type", "message")
    if kind == "message":
        content, role = item.get("content"), item.get("role")
        if not isinstance(role, str) or not isinstance(content, str | list):
            raise ApiError(400, "an input message needs a role and content")
        if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
            raise ApiError(400, TEXT_ONLY)
        return {"role": role, "content": openai_content(content, role)}
    if kind == "function_call":
        function = {"name": _string(item, "name"), "arguments": _string(item, "arguments")}
        call = {"id": _string(item, "call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        parts = output if isinstance(output, list) else []
        if not isinstance(output, str | list) or not all(isinstance(part, dict) for part in parts):
            raise ApiError(400, "an item of type function_call_output needs output as text")
        return {"role": "tool", "tool_call_id": _string(item, "call_id"), "content": openai_text(output)}
    if kind == "reasoning":
        parts = item.get("content") or []
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        reasoning = "\n".join(text for text in texts if isinstance(text, str))
        return {"role": "assistant", "content": "", "reasoning_content": reasoning}
    raise ApiError(400, f"input items of type {str(kind)[:32]!r} are not supported")


def _tool(tool: Object) -> Object:
    if tool.get("type") != "function":
        raise ApiError(400, "only tools of type function are supported")
    kept = {key: tool[key] for key in ("description", "parameters") if tool.get(key)}
    return {"type": "function", "function": {"name": _string(tool, "name"), **kept}}


def _string(item: Object, key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"an item of type {str(item.get('type'))[:32]} needs {key} as text")
    return value
