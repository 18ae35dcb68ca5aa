"""The user's approval rules: for this chat, and saved ones for a folder.

A rule is a tool's name, which covers all its calls, or a name and a pattern for the call's subject: `edit_file
src/*.py`, `run_command git status *`. A * matches anything. Only the user creates rules; nothing that a model or a tool
writes is read as one.
"""

import fnmatch
import json
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from gguf_io.system import make_folder
from localllm.actions.action import Action
from localllm.errors import SettingsError
from localllm.files import read_text, write_whole
from localllm.settings import config_path
from localllm.text import harmless

_QUESTIONS = {
    "run_command": "Run this command?",
    "edit_file": "Make this change?",
    "read_file": "Show this hidden file to the model?",
    "list_files": "Show this hidden folder to the model?",
    "search_files": "Search this hidden folder?",
    "undo": "Undo this change? It was made in another chat.",
}


class Decision(StrEnum):
    """The user's decision: refuse, allow this call, or allow what its rule covers in this chat or always."""

    REFUSE = "refuse"
    ONCE = "once"
    CHAT = "chat"
    ALWAYS = "always"


def approvals_path() -> Path:
    """The file of saved rules, e.g. ~/.config/localllm/approvals.json. It may not exist."""
    return config_path().parent / "approvals.json"


class Approvals:
    """The rules for one folder. given: rules for this chat or this run."""

    def __init__(self, folder: Path, file: Path | None = None, given: Sequence[str] = ()) -> None:
        """file: holds the saved rules; None for none. Raises SettingsError if it is damaged."""
        self.rules = list(given)
        self._folder, self._file = str(Path(os.path.realpath(folder))), file
        if file is not None:
            self.rules += _read(file).get(self._folder, [])

    def allow(self, action: Action) -> bool:
        """Whether the action may run without asking."""
        return not action.asks or self.covers(action)

    def covers(self, action: Action) -> bool:
        """Whether a rule covers the action."""
        return any(_covers(rule, action) for rule in self.rules)

    def add(self, action: Action, lasting: bool) -> None:
        """Allow what the action's pattern covers. lasting: also save the rule. Raises SettingsError if that fails."""
        rule = rule_for(action)
        assert rule is not None
        self.rules.append(rule)
        if not lasting or self._file is None:
            return
        kept = _read(self._file)
        kept[self._folder] = sorted({*kept.get(self._folder, []), rule})
        try:
            make_folder(self._file.parent)
            write_whole(self._file, json.dumps(kept, indent=2).encode())
        except OSError as error:
            raise SettingsError(f"{self._file}: the rule cannot be kept: {error.strerror}.") from error


def question_of(action: Action) -> str:
    """What the user is asked about an action."""
    return _QUESTIONS.get(action.tool, f"Call {harmless(action.tool)}?")


def rule_for(action: Action) -> str | None:
    """The rule to offer the user; None if only this one call can be allowed."""
    return None if action.pattern is None else f"{action.tool} {action.pattern}".strip()


def _covers(rule: str, action: Action) -> bool:
    tool, _, pattern = rule.partition(" ")
    if tool != action.tool:
        return False
    if not pattern:
        return action.pattern is not None or action.tool == "run_command"
    if action.pattern is None:
        return False
    # "git status *" covers "git status" too.
    return fnmatch.fnmatchcase(action.subject, pattern) or pattern == f"{action.subject} *"


def _read(file: Path) -> dict[str, list[str]]:
    text = read_text(file, SettingsError, missing="{}")
    try:
        kept = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{file}: is not JSON: {error}. Fix it or move it away.") from error
    if not isinstance(kept, dict) or not all(
        isinstance(rules, list) and all(isinstance(rule, str) for rule in rules) for rules in kept.values()
    ):
        raise SettingsError(f"{file}: is not an object of lists of rules. Fix it or move it away.")
    return kept
