"""JSON from models, servers, clients and people, parsed to a bounded depth.

Python's parser stops at a depth that depends on its version and on the stack: some 990 levels in 3.11, over 50,000 in
3.14. What copies, compares or searches a value is recursive and stops far earlier, at 1,000 frames.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

MAX_DEPTH = 128
TOO_DEEP = f"the JSON is nested deeper than {MAX_DEPTH} levels"


def parsed(text: str | bytes | bytearray) -> Any:
    """Parse JSON. Raises ValueError if it is none, or is nested deeper than MAX_DEPTH levels."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    for _ in levels(value):
        pass
    return value


def levels(value: Any) -> Iterator[Sequence[dict[str, Any] | list[Any]]]:
    """The objects and lists of each level, from the outermost. Raises ValueError beyond MAX_DEPTH levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        yield level
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, dict | list)]
    if level:
        raise ValueError(TOO_DEEP)
