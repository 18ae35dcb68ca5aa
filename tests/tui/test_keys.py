"""keys.toml: parsing and checks; every action is known."""

import re
from pathlib import Path

import pytest

import tui
from localllm.errors import SettingsError
from tui.commands.table import COMMANDS
from tui.start import actions, load_keys


def test_no_file_changes_nothing(tmp_path: Path) -> None:
    assert load_keys(tmp_path / "keys.toml") == {}


def test_keys_by_action(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('new = "f9"\n"prompt.newline" = "ctrl+k,ctrl+j"\n', encoding="utf-8")
    assert load_keys(file) == {"new": "f9", "prompt.newline": "ctrl+k,ctrl+j"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('neww = "f9"', "Did you mean 'new'"),
        ("new = 9", "must be a key"),
        ("new = ", "not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=message):
        load_keys(file)


def test_every_command_with_a_key_is_an_action() -> None:
    assert {command.name for command in COMMANDS if command.key} <= set(actions())


def test_every_binding_with_an_id_can_be_changed() -> None:
    named: set[str] = set()
    for file in Path(tui.__file__).parent.rglob("*.py"):
        named |= set(re.findall(r'Binding\(.*\bid="([\w.]+)"', file.read_text(encoding="utf-8")))
    assert {"approval.refuse", "scroll.up", "prompt.send"} < named <= set(actions())
