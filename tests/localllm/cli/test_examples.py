"""Every command's help ends with examples, and each of them parses."""

import re
import shlex
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from localllm.cli.help import EXAMPLES, PANELS
from localllm.cli.main import COMMANDS, MEASURES, application, main
from tui.main import COMMANDS as CHAT_COMMANDS

ALL = application({**CHAT_COMMANDS, **COMMANDS})
PROGRAM: Any = typer.main.get_command(ALL)


def test_every_command_has_examples() -> None:
    commands = PROGRAM.commands.keys() - {"measure"}
    assert commands - EXAMPLES.keys() == set(), "add examples to localllm/cli/help.py"
    assert EXAMPLES.keys() - commands == set()


def test_the_help_lists_every_command_once_and_measures_as_a_group() -> None:
    listed = [name for names in PANELS.values() for name in names]
    assert sorted([*listed, *MEASURES]) == sorted(PROGRAM.commands)
    assert list(PROGRAM.commands["measure"].commands) == list(MEASURES)
    told = CliRunner().invoke(ALL, ["--help"]).stdout
    assert not any(re.search(rf"^  {name} ", told, re.MULTILINE) for name in MEASURES)
    assert all(f"\n{title}:\n" in told for title in PANELS)


def told_by(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status and the output of the command line."""
    monkeypatch.setattr("sys.argv", ["localllm", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out + shown.err


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["help"], ["--help"]),
        (["help", "help"], ["--help"]),
        (["help", "plan"], ["plan", "--help"]),
        (["help", "ls"], ["list", "--help"]),
        (["ls", "--json"], ["list", "--json"]),
        (["help", "measure", "cost"], ["measure", "cost", "--help"]),
        (["measure"], ["measure", "--help"]),
        (["help", "nothing"], ["nothing", "--help"]),
    ],
)
def test_other_ways_to_say_the_same(
    words: list[str], same: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told_by(words, monkeypatch, capsys) == told_by(same, monkeypatch, capsys)


@pytest.mark.parametrize("name", MEASURES)
def test_measures_are_the_same_in_the_group(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, alone = told_by([name, "--help"], monkeypatch, capsys)
    status, grouped = told_by(["measure", name, "--help"], monkeypatch, capsys)
    assert (status, grouped) == (0, alone.replace(f"localllm {name} [", f"localllm measure {name} [", 1))


def test_what_the_group_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = told_by(["measure", "run", "builtin"], monkeypatch, capsys)
    assert status == 2 and "No such command 'run'" in told and "localllm measure --help" in told


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
    assert "Without a command, a terminal opens the chat" in " ".join(told.split())


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_help_tells_types_of_pythons(name: str) -> None:
    assert "<" not in CliRunner().invoke(ALL, [name, "-h"]).stdout
