"""The reference of commands and settings, in the documentation and as a man page."""

import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from localllm.cli.help import PANELS
from localllm.cli.main import COMMANDS, MEASURES
from localllm.cli.reference import EXIT_CODES, man_page
from localllm.front.terminal import ExitCode
from localllm.settings import MEANINGS, Settings
from tui.main import COMMANDS as CHAT_COMMANDS

ALL = {**CHAT_COMMANDS, **COMMANDS}
DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture(scope="module")
def page() -> str:
    return man_page(ALL, "1.2.3")


def test_every_setting_and_exit_code_is_explained() -> None:
    assert MEANINGS.keys() == {field.name for field in fields(Settings)}
    assert EXIT_CODES.keys() == set(ExitCode)


def test_the_settings_table_has_defaults_ranges_and_links() -> None:
    rows = [row for row in (DOCS / "settings.md").read_text(encoding="utf-8").splitlines() if row.startswith("| `")]
    assert [row.split("`")[1] for row in rows[: len(fields(Settings))]] == [field.name for field in fields(Settings)]
    assert "| `ctx` | the model's | 1 to 16,777,216 | context length in tokens |" in rows
    assert any(
        row.startswith("| `fallbacks` | none |  |") and row.endswith("([more](models.md#a-name-for-several-models)) |")
        for row in rows
    )


def test_the_command_reference_has_every_command_once() -> None:
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    headings = [line[4:] for line in text.splitlines() if line.startswith("### ")]
    wanted = [name for names in PANELS.values() for name in names] + [f"measure {name}" for name in MEASURES]
    assert sorted(headings) == sorted(wanted)
    assert "| `--ctx N` | Context limit in tokens (the model's). |" in text
    assert "\n    localllm gpu install\n" in text


def test_the_man_page_has_every_command_and_setting(page: str) -> None:
    lines = page.splitlines()
    assert {f".SS {name}" for names in PANELS.values() for name in names} <= set(lines)
    assert {f".B {name}" for name in MEANINGS} <= set(lines)
    assert '.TH LOCALLLM 1 "" "localllm 1.2.3" "User Commands"' in lines


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_groff_formats_the_man_page_without_warnings(page: str) -> None:
    formatted = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-rLL=100n"], input=page, capture_output=True, text=True, check=True
    )
    assert formatted.stderr == ""
    assert "File with the API key." in formatted.stdout
