"""Tools that a conversation gets after its beginning.

A prompt begins with its list of tools, so a longer list would change everything after it, and nothing computed before
could be reused. The definitions of later tools are therefore written where the conversation gets them.
"""

import json
from collections.abc import Mapping
from typing import Any

Tool = Mapping[str, Any]


def name_of(tool: Tool) -> str:
    """The name of a tool in OpenAI's format."""
    return str(tool["function"]["name"])


def ordered(tool: Tool) -> dict[str, Any]:
    """A tool with its keys in OpenAI's order: the prompt must not depend on the key order of the client's JSON."""
    function = tool["function"]
    known = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    others = {key: value for key, value in function.items() if key != "strict"}
    return {"type": "function", "function": {**known, **others}}


def definition(tool: Tool) -> str:
    """A later tool as the model reads it."""
    return f"This tool can be called now:\n{json.dumps(ordered(tool), ensure_ascii=False)}"
