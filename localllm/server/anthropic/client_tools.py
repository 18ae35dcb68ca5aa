"""Tools that Anthropic defines and the client runs: a shell, a text editor, a memory.

Requests name only their type, since Anthropic's models know them; other models get their arguments as a schema.
https://docs.claude.com/en/docs/agents-and-tools/tool-use
"""

import re
from collections.abc import Mapping, Sequence

from localllm.server.bodies import Object

_TEXT: Object = {"type": "string"}
_WHOLE: Object = {"type": "integer"}
_RANGE: Object = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}
_EDITS = {"file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _WHOLE, "insert_text": _TEXT}


def _commands(names: Sequence[str], **properties: Object) -> Object:
    command = {"type": "string", "enum": list(names)}
    return {"type": "object", "properties": {"command": command, **properties}, "required": ["command"]}


_EDITOR = ("view", "create", "str_replace", "insert")
_DESCRIBED: Mapping[str, tuple[str, Object]] = {
    "bash": (
        "Run a command in a bash session that stays open. restart: begin a new session.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor": (
        "View and edit files. view: a file, or its lines in view_range, or a folder; create: write file_text; "
        "str_replace: replace old_str, which occurs once, by new_str; insert: put a text after the line insert_line.",
        _commands(_EDITOR, path=_TEXT, view_range=_RANGE, **_EDITS),
    ),
    "memory": (
        "Notes that last beyond this conversation, as files under /memories. view, create (file_text), str_replace "
        "(old_str, new_str), insert (insert_line, insert_text), delete, rename (old_path, new_path).",
        _commands(
            [*_EDITOR, "delete", "rename"],
            path=_TEXT,
            view_range=_RANGE,
            **_EDITS,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}
_TYPE = re.compile(r"(bash|text_editor|memory)_\d{8}")
_HAS_UNDO = ("text_editor_20241022", "text_editor_20250124")


def known(kind: str | None) -> tuple[str, Object] | None:
    """The description and the schema of a type of tools; None for types that the client does not run."""
    found = _TYPE.fullmatch(kind or "")
    if found is None:
        return None
    description, schema = _DESCRIBED[found[1]]
    if kind in _HAS_UNDO:
        return f"{description} undo_edit: take back the last edit of a file.", _with_undo(schema)
    return description, schema


def _with_undo(schema: Object) -> Object:
    command = {"type": "string", "enum": [*_EDITOR, "undo_edit"]}
    return {**schema, "properties": {**schema["properties"], "command": command}}
