"""The reference of commands and settings, made from the commands and settings themselves: a man page."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import typer

from localllm.cli.help import EXAMPLES, PANELS
from localllm.cli.main import application
from localllm.front.options import PROGRAM
from localllm.front.terminal import ExitCode
from localllm.settings import MEANINGS, PREFIX, Settings

EXIT_CODES = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "something failed inside localllm; --debug shows where",
    ExitCode.REFUSED: "the request cannot be fulfilled; the message says why",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C; what was written stays",
    ExitCode.UNREAD: "the reader of standard output closed it (localllm run ... | head)",
}


def commands(table: dict[str, str]) -> Iterator[tuple[str, str, Any, Any]]:
    """The panel, the name, the command and a context for its help, of each command that the help lists.

    table: as in cli.main. A group is followed by its commands.
    """
    group: Any = typer.main.get_command(application(table))
    for panel, names in PANELS.items():
        for name in names:
            command = group.commands[name]
            yield panel, name, command, typer.Context(command, info_name=f"{PROGRAM} {name}")
            for below, one in getattr(command, "commands", {}).items():
                yield panel, f"{name} {below}", one, typer.Context(one, info_name=f"{PROGRAM} {name} {below}")


def parameters(command: Any, context: Any) -> list[tuple[str, str]]:
    """Name and description of each argument and option; none of a group. --help is left out."""
    if hasattr(command, "commands"):
        return []
    rows = [*command.rows(context, "argument"), *command.rows(context, "option")]
    return [(name, text) for name, text in rows if not name.endswith("--help")]


def usage(command: Any, context: Any) -> str:
    return " ".join([context.info_name, *command.collect_usage_pieces(context)])


def description(command: Any) -> list[str]:
    """The paragraphs of a command's help."""
    return [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(command.help or "").split("\n\n")]


def default(name: str) -> str:
    value = getattr(Settings(), name)
    return MEANINGS[name].unset if value in (None, "") else value if isinstance(value, str) else json.dumps(value)


def man_page(table: dict[str, str], version: str) -> str:
    """The manual page, in the language of man(7)."""
    lines = [
        f'.TH LOCALLLM 1 "" "localllm {_roff(version)}" "User Commands"',
        ".SH NAME",
        "localllm \\- run language models locally",
        ".SH SYNOPSIS",
        ".B localllm",
        "[COMMAND] [ARGUMENTS]",
        ".SH DESCRIPTION",
        "Runs GGUF language models on this machine: a chat in the terminal, a server with the protocols of Ollama,",
        "OpenAI and Anthropic, and commands for models. Without a command it opens the chat.",
        ".SH COMMANDS",
    ]
    for _, name, command, context in commands(table):
        lines += [f".SS {name}", f".B {_roff(usage(command, context))}"]
        for paragraph in description(command):
            lines += [".PP", _roff(paragraph)]
        for one, text in parameters(command, context):
            lines += [".TP", f".B {_roff(one)}", _roff(text)]
        if examples := EXAMPLES.get(name.split()[-1]):
            lines += [".PP", "Examples:", ".PP", ".EX", *(f"  {_roff(line)}" for line in examples), ".EE"]
    lines += [
        ".SH SETTINGS",
        "Set in config.toml (`localllm config` names it), or in the environment with the prefix "
        f"{_roff(PREFIX)}, or by an option of the same name.",
    ]
    for field in fields(Settings):
        lines += [
            ".TP",
            f".B {_roff(field.name)}",
            _roff(f"{MEANINGS[field.name].text} (default: {default(field.name)})"),
        ]
    lines.append(".SH EXIT STATUS")
    for code, text in EXIT_CODES.items():
        lines += [".TP", f".B {int(code)}", _roff(text)]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    """Text that means itself in man(7): backslashes, hyphens of options, and control characters at a line's start."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text
