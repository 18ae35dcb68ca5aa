"""/v1/models for Anthropic's clients, which send the header anthropic-version."""

from datetime import UTC, datetime

from anyio import to_thread
from fastapi import APIRouter
from starlette.routing import Match
from starlette.types import Scope

from localllm.server.anthropic.messages import AnthropicRoute
from localllm.server.bodies import Object
from localllm.server.errors import ApiError
from localllm.server.served import ServedRow
from localllm.server.service import ServiceDep

HEADER = b"anthropic-version"
MOST_LISTED = 1000


class AnthropicClientRoute(AnthropicRoute):
    """A route of Anthropic's under a path that OpenAI's protocol has too."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See starlette's Route. Other clients' requests do not match."""
        is_meant = any(name == HEADER for name, _ in scope.get("headers", ()))
        return super().matches(scope) if is_meant else (Match.NONE, {})


router = APIRouter(route_class=AnthropicClientRoute, include_in_schema=False)


@router.get("/v1/models")
async def models(service: ServiceDep, limit: int = 20, after_id: str = "", before_id: str = "") -> Object:
    """List the models that requests may name, page by page."""
    if not 1 <= limit <= MOST_LISTED:
        raise ApiError(400, f"limit must be from 1 to {MOST_LISTED}")
    rows = [_row(about, context) for about, context in await service.rows()]
    names = [row["id"] for row in rows]
    for name in filter(None, (after_id, before_id)):
        if name not in names:
            raise ApiError(400, "after_id and before_id must be ids from the list")
    first = names.index(after_id) + 1 if after_id else 0
    end = names.index(before_id) if before_id else len(names)
    if before_id:
        first = max(first, end - limit)
    page = rows[first : min(first + limit, end)]
    left = first > 0 if before_id else first + len(page) < end
    ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"data": page, "has_more": left, **ids}


@router.get("/v1/models/{model:path}")
async def model(model: str, service: ServiceDep) -> Object:
    """Describe one model."""
    about = await to_thread.run_sync(service.about, model)
    return _row(about, (await service.contexts([about]))[0])


def _row(about: ServedRow, context: int) -> Object:
    made = datetime.fromtimestamp(about.created, UTC).isoformat().replace("+00:00", "Z")
    told: Object = {"type": "model", "id": about.name, "display_name": about.name, "created_at": made}
    return told | ({"max_input_tokens": context, "max_tokens": context} if context else {})
