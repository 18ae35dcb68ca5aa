"""Which schemas stand for text, however often they refer to each other."""

from typing import Any

import pytest

from localllm.answer.tool_calls.call import is_text

TEXT = {"type": "string"}


def chain(count: int, last: Any) -> dict[str, Any]:
    """Definitions that offer the next one twice: the last is reached in 2^count ways."""
    made = {f"d{i}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)}
    return {"$defs": {**made, f"d{count}": last}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"anyOf": [TEXT, {"type": "null"}]}, (True, True)),
        ({"oneOf": [TEXT, {"anyOf": [TEXT, {"enum": ["a", None]}]}]}, (True, True)),
        ({"anyOf": [TEXT, {"type": "number"}]}, (False, False)),
        (chain(60, TEXT), (True, False)),
        (chain(60, {"type": "number"}), (False, False)),
        (chain(2000, TEXT), (False, False)),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, TEXT]}}, "$ref": "#/$defs/a"}, (False, False)),
    ],
)
def test_text_is_recognised(schema: dict[str, Any], found: tuple[bool, bool]) -> None:
    assert is_text(schema, schema) == found
