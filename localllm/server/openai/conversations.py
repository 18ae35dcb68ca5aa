"""Stored responses and conversations: /v1/responses/{id}, /v1/responses/compact, /v1/conversations."""

import secrets
import time
from typing import Annotated, Any, cast

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import Field

from localllm.answer.request import AnswerRequest
from localllm.engine.request import ContextPolicy
from localllm.server.bodies import DEFAULTS, Body, NamedBody, Object, Objects
from localllm.server.errors import ApiError
from localllm.server.keys import namespace_of
from localllm.server.limits import MAX_MESSAGES
from localllm.server.openai.items import conversation_of, sealed
from localllm.server.openai.schema import Metadata
from localllm.server.openai.stored import Stored, listed, page
from localllm.server.openai.wire import OpenAIRoute, item_usage
from localllm.server.service import ServiceDep, for_user_of

router = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])

LONGEST_SUMMARY = 4096  # tokens
_SUMMARISE = (
    "Summarise this conversation for an assistant that goes on with it and cannot see it: what the user wants, what "
    "was found out and decided, what was done, which files and names matter, and what comes next. Write only that."
)

Items = Annotated[list[Object], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class CompactBody(NamedBody):
    """/v1/responses/compact."""

    input: str | Items = ""
    instructions: str | None = None
    previous_response_id: str | None = None


class ConversationBody(Body):
    """/v1/conversations: the first items, and the client's own notes."""

    items: Items | None = None
    metadata: Metadata | None = None


class ItemsBody(Body):
    """/v1/conversations/{id}/items."""

    items: Objects


def stored_of(http: Request) -> tuple[Stored, str]:
    """What the server stores, and the user whose part of it a request may see."""
    return cast("Stored", http.app.state.stored), namespace_of(http.scope)


@router.get("/v1/responses/{response_id}")
async def response(response_id: str, http: Request, stream: bool = False) -> Object:
    """A stored response."""
    if stream:
        raise ApiError(400, "a stored response is not streamed again; leave stream out")
    stored, user = stored_of(http)
    return stored.response(user, response_id).about


@router.delete("/v1/responses/{response_id}")
async def forget(response_id: str, http: Request) -> Object:
    """Delete a stored response."""
    stored, user = stored_of(http)
    stored.remove(user, "response", response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(response_id: str, http: Request) -> None:
    """Refused: only responses in the background can be cancelled, and there are none here. Raises ApiError 400."""
    stored, user = stored_of(http)
    stored.response(user, response_id)
    raise ApiError(400, "only a response in the background can be cancelled; close the connection of another")


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(response_id: str, http: Request, order: str = "desc", after: str = "", limit: int = 20) -> Object:
    """The items of a response's conversation before its answer."""
    stored, user = stored_of(http)
    entry = stored.response(user, response_id)
    return page(entry.items[: entry.asked], order, after, limit)


@router.post("/v1/responses/compact")
async def compact(body: CompactBody, http: Request, service: ServiceDep) -> Object:
    """Shorten a conversation: the user's messages, and the model's summary of everything as one item."""
    body.model = await service.model_or_only(body.model)
    stored, user = stored_of(http)
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) and body.input else body.input
    items = stored.expanded(user, given or [], body.previous_response_id)
    request = await to_thread.run_sync(_to_summarise, items, body.instructions)
    async with service.run(body.model, for_user_of(http, [request])) as run:
        await run.finish()
        answer = run.answers[0]
    kept = [listed(item) for item in items if item.get("role") == "user"]
    item = {"type": "compaction", "id": f"cmp_{secrets.token_hex(12)}", "encrypted_content": sealed(answer.content)}
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*kept, item],
        "usage": item_usage(answer),
    }


def _to_summarise(items: list[Object], instructions: str | None) -> AnswerRequest:
    """Raises ApiError 400 for items that no model can read, or none."""
    if not (said := conversation_of(items)):
        raise ApiError(400, "there is nothing to compact; send input or a previous_response_id")
    system = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*system, *said, {"role": "user", "content": _SUMMARISE}]
    return AnswerRequest(
        messages=messages,
        defaults=DEFAULTS,
        max_tokens=LONGEST_SUMMARY,
        may_skip_thinking=True,
        context_policy=ContextPolicy.DROP_MESSAGES,
    )


@router.post("/v1/conversations")
async def begin(body: ConversationBody, http: Request) -> Object:
    """Begin a conversation, to which responses add their items."""
    stored, user = stored_of(http)
    return stored.begin(user, body.items or [], body.metadata or {})


@router.get("/v1/conversations/{conversation_id}")
async def conversation(conversation_id: str, http: Request) -> Object:
    """A conversation, without its items."""
    stored, user = stored_of(http)
    return stored.conversation(user, conversation_id).about


@router.post("/v1/conversations/{conversation_id}")
async def change(conversation_id: str, body: ConversationBody, http: Request) -> Object:
    """Replace a conversation's metadata."""
    stored, user = stored_of(http)
    about = stored.conversation(user, conversation_id).about
    about["metadata"] = body.metadata or {}
    return about


@router.delete("/v1/conversations/{conversation_id}")
async def end(conversation_id: str, http: Request) -> Object:
    """Delete a conversation."""
    stored, user = stored_of(http)
    stored.remove(user, "conversation", conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.get("/v1/conversations/{conversation_id}/items")
async def items(conversation_id: str, http: Request, order: str = "desc", after: str = "", limit: int = 20) -> Object:
    """The items of a conversation."""
    stored, user = stored_of(http)
    return page(stored.conversation(user, conversation_id).items, order, after, limit)


@router.post("/v1/conversations/{conversation_id}/items")
async def add(conversation_id: str, body: ItemsBody, http: Request) -> Object:
    """Add items to a conversation."""
    stored, user = stored_of(http)
    added = stored.add(user, conversation_id, body.items)
    return page(added, "asc", "", 100)


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def item(conversation_id: str, item_id: str, http: Request) -> Object:
    """An item of a conversation. Raises ApiError 404."""
    stored, user = stored_of(http)
    return listed(_item(stored.conversation(user, conversation_id).items, item_id))


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def remove(conversation_id: str, item_id: str, http: Request) -> Object:
    """Delete an item of a conversation. Raises ApiError 404."""
    stored, user = stored_of(http)
    _item(stored.conversation(user, conversation_id).items, item_id)
    return stored.remove_item(user, conversation_id, item_id)


def _item(items: list[Object], item_id: str) -> Any:
    found = next((one for one in items if one["id"] == item_id), None)
    if found is None:
        raise ApiError(404, f"item {item_id[:64]!r} not found in the conversation")
    return found
