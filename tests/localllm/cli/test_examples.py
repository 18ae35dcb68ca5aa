"""Every command's help ends with examples, and each of them parses."""

import shlex
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from localllm.cli.help import EXAMPLES
from localllm.cli.main import COMMANDS, application
from tui.main import COMMANDS as CHAT_COMMANDS

ALL = application({**CHAT_COMMANDS, **COMMANDS})
PROGRAM: Any = typer.main.get_command(ALL)


def test_every_command_has_examples() -> None:
    assert EXAMPLES.keys() == PROGRAM.commands.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_shown_and_can_be_called(name: str) -> None:
    told = CliRunner().invoke(ALL, [name, "--help"]).stdout
    for line in EXAMPLES[name]:
        assert f"\n    {line}\n" in told + "\n"
        program, command, *arguments = shlex.split(line.rpartition("| ")[2])
        assert (program, command) == ("localllm", name)
        with PROGRAM.commands[name].make_context(name, arguments):  # which refuses unknown options
            pass


def test_the_help_of_all_begins_with_the_chat_and_needs_no_long_flag() -> None:
    told = CliRunner().invoke(ALL, ["-h"]).stdout
    assert told.index("  chat ") < told.index("  run ")
    assert "Without a command it opens the chat" in " ".join(told.split())


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_help_tells_types_of_pythons(name: str) -> None:
    assert "<" not in CliRunner().invoke(ALL, [name, "-h"]).stdout
