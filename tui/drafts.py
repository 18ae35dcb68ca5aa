"""What the user wrote and has not sent, kept through crashes, kills and closed terminals.

Each running chat keeps its texts in the store under its own name. The next chat takes over those whose program has
ended: the newest text goes into the prompt, the others into the history.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from localllm.chats import Attachment, SessionStore
from tui.widgets.prompt import Prompt

_PREFIX = "drafts of "


@dataclass(frozen=True, slots=True)
class UnsentText:
    """An unsent text, with the pasted texts that it names."""

    text: str
    pasted: tuple[Attachment, ...] = ()


class Drafts:
    """Keeps the drafts of this program. Methods raise SessionError."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._kept: list[UnsentText] = []
        self._name = ""

    def keep(self, prompts: Sequence[Prompt]) -> None:
        """Store the drafts in some prompts, the first one's last, if they have changed."""
        drafts = [
            UnsentText(text, tuple(file for name, file in prompt.pasted.items() if f"@{name}" in text))
            for prompt in reversed(prompts)
            for text in prompt.unsent
        ]
        if drafts == self._kept:
            return
        if drafts:
            values = [asdict(draft) for draft in drafts]
            self._store.remember(self._own_name(), json.dumps(values), lasting=False)
        else:
            self._store.forget(self._own_name())
        self._kept = drafts

    def take_over(self) -> list[UnsentText]:
        """The drafts of chats that have ended, oldest first. They are removed from the store."""
        found: list[UnsentText] = []
        for name, value in self._store.remembered_with(_PREFIX).items():
            if not _runs(name):
                found += _read(value)
                self._store.forget(name)
        return found

    def _own_name(self) -> str:
        """This program's name in the store: its process and when it began, because numbers are used again."""
        if not self._name:
            import psutil  # slow to import; not needed at startup

            self._name = f"{_PREFIX}{os.getpid()} {psutil.Process().create_time()}"
        return self._name


def _runs(name: str) -> bool:
    """Whether the program with this name is running."""
    import psutil

    number, _, began = name.removeprefix(_PREFIX).partition(" ")
    try:
        return f"{psutil.Process(int(number)).create_time()}" == began
    except (psutil.Error, ValueError):
        return False


def _read(value: str) -> list[UnsentText]:
    """Stored drafts; none if they are damaged."""
    try:
        return [
            UnsentText(str(draft["text"]), tuple(Attachment.stored(file) for file in draft["pasted"]))
            for draft in json.loads(value)
        ]
    except (ValueError, TypeError, KeyError):
        return []
