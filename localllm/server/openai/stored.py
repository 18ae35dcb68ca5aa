"""Responses, their items and conversations, kept in memory for later requests."""

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.server.bodies import Object
from localllm.server.contents import text_field
from localllm.server.errors import ApiError

MAX_CHARS = 32 * 2**20  # of everything together, as JSON
_NAMING = frozenset({"id", "type"})


def _is_reference(item: Object) -> bool:
    """Whether an input item only names another one."""
    return item.get("type") == "item_reference" or ("id" in item and not item.get("type") and item.keys() <= _NAMING)


def _with_id(item: Object) -> Object:
    """An input item with an id, by which requests may name it."""
    if item.get("id") and isinstance(item["id"], str):
        return item
    prefix = "msg" if _is_message(item) else "item"
    return {**item, "id": f"{prefix}_{secrets.token_hex(12)}"}


def _is_message(item: Object) -> bool:
    return (item.get("type") or "message") == "message"


@dataclass(slots=True)
class _Entry:
    """Items, and what is told of them: a response, a conversation, or nothing of a single item.

    asked: how many of a response's items are its input. own: the first item that it brought. chars: of its JSON.
    """

    items: list[Object]
    chars: int
    about: Object = field(default_factory=dict)
    asked: int = 0
    own: int = 0


# A user, what is kept, and its id. Clients choose ids of items, so an item may be called like a response.
_Key = tuple[str, Literal["response", "conversation", "item"], str]


class Stored:
    """What is kept, by id, separate for each user; evicts the oldest. Use it on the event loop.

    Methods that get an id raise ApiError 404 if nothing of the kind is kept under it.
    """

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._found: OrderedDict[_Key, _Entry] = OrderedDict()

    def keep(self, user: str, response: Object, asked: Sequence[Object], new: int, conversation: str | None) -> None:
        """Keep a response. asked: the items of its conversation, of which the last `new` are this request's.

        conversation: to which these and the answer's items are added.
        """
        added = [*asked[len(asked) - new :], *response["output"]]
        for item in added:
            self._put((user, "item", str(item["id"])), _Entry([item], 0))
        chars = len(json.dumps([added, {**response, "output": []}]))
        items = [*asked, *response["output"]]
        self._put((user, "response", response["id"]), _Entry(items, chars, response, len(asked), len(asked) - new))
        key: _Key = (user, "conversation", conversation or "")
        if entry := self._found.get(key):
            self._put(key, _Entry([*entry.items, *added], entry.chars + chars, entry.about))
        self._evict()

    def expanded(
        self, user: str, given: Sequence[Object], previous: str | None, conversation: str | None = None
    ) -> list[Object]:
        """The items of a conversation, with ids, and references resolved.

        Raises ApiError 400 for an item that is not kept.
        """
        found: list[Object] = []
        if previous:
            found += self._referred((user, "response", previous), "previous_response_not_found")
        if conversation:
            found += self.conversation(user, conversation).items
        for item in given:
            if _is_reference(item):
                found += self._referred((user, "item", text_field("an item", item, "id")))
            else:
                found.append(_with_id(item))
        return found

    def response(self, user: str, identity: str) -> _Entry:
        """A response."""
        return self._known((user, "response", identity))

    def conversation(self, user: str, identity: str) -> _Entry:
        """A conversation."""
        return self._known((user, "conversation", identity))

    def begin(self, user: str, items: Sequence[Object], metadata: Mapping[str, Any]) -> Object:
        """Keep a new conversation, and tell of it."""
        identity = f"conv_{secrets.token_hex(16)}"
        about = {"id": identity, "object": "conversation", "created_at": int(time.time()), "metadata": dict(metadata)}
        self._put((user, "conversation", identity), _Entry([], len(json.dumps(about)), about))
        self.add(user, identity, items)
        return about

    def add(self, user: str, identity: str, items: Sequence[Object]) -> list[Object]:
        """Add items to a conversation. Returns them with their ids."""
        entry, added = self.conversation(user, identity), self.expanded(user, items, None)
        for item in added:
            self._put((user, "item", str(item["id"])), _Entry([item], 0))
        chars = entry.chars + len(json.dumps(added))
        self._put((user, "conversation", identity), _Entry([*entry.items, *added], chars, entry.about))
        self._evict()
        return added

    def remove_item(self, user: str, identity: str, item: str) -> Object:
        """Remove an item from a conversation, and tell of the conversation."""
        entry = self.conversation(user, identity)
        gone = [one for one in entry.items if one["id"] == item]
        left = [one for one in entry.items if one["id"] != item]
        chars = entry.chars - sum(len(json.dumps(one)) for one in gone)
        self._put((user, "conversation", identity), _Entry(left, chars, entry.about))
        self._found.pop((user, "item", item), None)
        return entry.about

    def remove(self, user: str, kind: Literal["response", "conversation"], identity: str) -> None:
        """Remove a response or conversation, and the items that it brought."""
        entry = self._known(key := (user, kind, identity))
        self._chars -= entry.chars
        del self._found[key]
        for item in entry.items[entry.own :]:
            self._found.pop((user, "item", str(item["id"])), None)

    def _known(self, key: _Key) -> _Entry:
        if (entry := self._found.get(key)) is None:
            _, kind, identity = key
            raise ApiError(404, f"{kind} {identity[:64]!r} not found; it was not stored, is deleted, or was evicted")
        return entry

    def _referred(self, key: _Key, code: str | None = None) -> list[Object]:
        if (entry := self._found.get(key)) is None:
            identity = key[-1][:64]
            raise ApiError(400, f"{identity} is not stored here, or no longer; send the whole conversation", code)
        return entry.items

    def _put(self, key: _Key, entry: _Entry) -> None:
        before = self._found.pop(key, None)
        self._chars += entry.chars - (before.chars if before else 0)
        self._found[key] = entry

    def _evict(self) -> None:
        while self._chars > self._max_chars:
            _, entry = self._found.popitem(last=False)
            self._chars -= entry.chars


def listed(item: Object) -> Object:
    """An item as lists show it: a message's text as a part."""
    if not _is_message(item):
        return item
    content, kind = item.get("content"), "output_text" if item.get("role") == "assistant" else "input_text"
    part = {"type": kind, "text": content} | ({"annotations": []} if kind == "output_text" else {})
    shown = {**item, "type": "message", "status": item.get("status") or "completed"}
    return {**shown, "content": [part]} if isinstance(content, str) else shown


def page(items: Sequence[Object], order: str, after: str, limit: int) -> Object:
    """A page of a list. Raises ApiError 400."""
    if order not in ("asc", "desc") or not 1 <= limit <= 100:
        raise ApiError(400, "order must be asc or desc, and limit from 1 to 100")
    found = [listed(item) for item in (items if order == "asc" else reversed(items))]
    names = [item["id"] for item in found]
    if after and after not in names:
        raise ApiError(400, "after must be the id of an item of the list")
    first = names.index(after) + 1 if after else 0
    data = found[first : first + limit]
    ends = (data[0]["id"], data[-1]["id"]) if data else ("", "")
    more = first + len(data) < len(found)
    return {"object": "list", "data": data, "first_id": ends[0], "last_id": ends[1], "has_more": more}
