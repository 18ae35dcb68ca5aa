"""What the chat says that is no part of the conversation: help, parameters, errors."""

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import Static

from localllm.text import harmless

Row = tuple[str, str, str]


class Note(Static):
    """Stands below the messages until the conversation goes on."""

    def __init__(self, content: Content | str, failure: bool = False) -> None:
        super().__init__(
            harmless(content) if isinstance(content, str) else content,
            markup=False,
            classes="note failure" if failure else "note",
        )


def aligned(rows: Sequence[Row]) -> Content:
    """Three columns, as wide as they have to be: a name, what it is, and something beside it."""
    first = max(len(name) for name, _, _ in rows) + 2
    second = max((len(what) for _, what, beside in rows if beside), default=0) + 2
    lines = [
        Content.assemble(
            (harmless(name).ljust(first), "bold"),
            harmless(what).ljust(second if beside else 0),
            (harmless(beside), "$foreground 60%"),
        )
        for name, what, beside in rows
    ]
    return Content("\n").join(lines)


def key_names(keys: str) -> str:
    """Keys as people write them: "ctrl+j,f1" is "Ctrl+J, F1"."""
    return ", ".join("+".join(part.capitalize() for part in key.strip().split("+")) for key in keys.split(",") if key)
