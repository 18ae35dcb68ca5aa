"""Items of earlier responses, kept in memory for clients that refer to them instead of sending them again."""

import json
from collections import OrderedDict
from collections.abc import Sequence

from localllm.server.bodies import Object
from localllm.server.errors import ApiError

MAX_CHARS = 32 * 2**20  # of all items together, as JSON


class StoredItems:
    """Responses and their items by id, separate for each user; evicts the oldest. Use it on the event loop."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._found: OrderedDict[tuple[str, str], tuple[list[Object], int]] = OrderedDict()

    def keep(self, user: str, response_id: str, asked: Sequence[Object], output: Sequence[Object]) -> None:
        """Keep a response: the items of its conversation (asked) and those of its answer (output)."""
        for item in output:
            self._put((user, item["id"]), [item], 0)
        added = len(json.dumps([*asked[-1:], *output]))  # earlier items are shared with the previous response
        self._put((user, response_id), [*asked, *output], added)
        while self._chars > self._max_chars:
            _, (_, chars) = self._found.popitem(last=False)
            self._chars -= chars

    def expanded(self, user: str, given: Sequence[Object], previous: str | None) -> list[Object]:
        """The items of a conversation, with references resolved. Raises ApiError 400 for an item that is not stored."""
        found = list(self._get(user, previous)) if previous else []
        for item in given:
            names = item.get("type") == "item_reference" or item.keys() == {"id"}
            found += self._get(user, str(item.get("id"))) if names else [item]
        return found

    def _get(self, user: str, identity: str) -> list[Object]:
        entry = self._found.get((user, identity))
        if entry is None:
            raise ApiError(400, f"{identity[:64]} is not stored here, or no longer; send the whole conversation")
        return entry[0]

    def _put(self, key: tuple[str, str], items: list[Object], chars: int) -> None:
        self._found[key] = items, chars
        self._chars += chars
