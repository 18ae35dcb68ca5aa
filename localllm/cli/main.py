"""The entry point: registers the commands and reports usage errors."""

import os
import sys
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.completion import completion_init  # type: ignore[attr-defined] # importable from here in all versions

from localllm.cli.help import FIRST_STEPS, CommandPanels, PlainCommand, PlainGroup, examples
from localllm.errors import RequestError
from localllm.front import terminal
from localllm.front.options import COMPLETION_VARIABLE, DEBUG, PROGRAM, with_flags
from localllm.front.terminal import ExitCode, reported_errors

_UsageError: Any = typer.BadParameter.__bases__[0]  # typer does not export it by name

COMMANDS = {
    "run": "localllm.cli.run:run",
    "ask": "localllm.wings.documents.ask:ask",
    "chats": "localllm.cli.chats:chats",
    "serve": "localllm.cli.serve:serve",
    "service": "localllm.cli.service:service",
    "launch": "localllm.wings.agents.launch:launch",
    "warm": "localllm.wings.agents.warm:warm",
    "show": "localllm.cli.show:show",
    "plan": "localllm.cli.plan:plan",
    "list": "localllm.cli.list:list_models",
    "pull": "localllm.cli.pull:pull",
    "push": "localllm.cli.pull:push",
    "rm": "localllm.cli.manage:remove",
    "cp": "localllm.cli.manage:copy",
    "verify": "localllm.cli.manage:verify",
    "create": "localllm.wings.importing.create:create",
    "cache": "localllm.cli.machine:cache",
    "bench": "localllm.wings.lab.commands.bench:bench",
    "loadtest": "localllm.wings.lab.commands.loadtest:loadtest",
    "simulate": "localllm.wings.lab.commands.simulate:simulate",
    "cost": "localllm.wings.lab.commands.cost:cost",
    "detect": "localllm.wings.lab.commands.detect:detect",
    "needle": "localllm.wings.lab.commands.needle:needle",
    "perplexity": "localllm.wings.lab.commands.quality:perplexity",
    "quantize": "localllm.wings.lab.commands.quality:quantize",
    "ps": "localllm.cli.resident:ps",
    "stop": "localllm.cli.resident:stop",
    "config": "localllm.cli.machine:config",
    "completion": "localllm.cli.completion:completion",
    "gpu": "localllm.cli.gpu:gpu",
    "doctor": "localllm.cli.machine:doctor",
}
"""Each command's function, in the order of the help (see help.PANELS)."""

MEASURES = ("bench", "loadtest", "simulate", "cost", "needle", "perplexity")
"""Commands that `localllm measure` groups. They also work without it, but the help does not list them."""

ALIASES = {"ls": "list"}


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        terminal.answer(f"localllm {version('localllm')}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run language models locally. Without a command, a terminal opens the chat."""


def _measure(given: typer.Context) -> None:
    """Measure: bench, loadtest, simulate, cost, needle, perplexity.

    Each command also works without `measure`, as in `localllm bench`.
    """
    if given.invoked_subcommand is None:
        terminal.answer(f"{given.get_help()}\n")


def application(commands: Mapping[str, str] = COMMANDS) -> typer.Typer:
    """The command line with these commands, and with `measure` if one of them measures; imports their functions."""
    app = typer.Typer(
        name=PROGRAM,
        cls=CommandPanels,
        epilog=FIRST_STEPS,
        context_settings={"help_option_names": ["-h", "--help"]},
        add_completion=False,  # `completion` prints the scripts
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    group = typer.Typer(cls=PlainGroup, rich_markup_mode=None)
    group.callback(invoke_without_command=True)(_measure)
    for name, function in commands.items():
        command = with_flags(DEBUG)(resolve_name(function))
        measures = name in MEASURES
        app.command(name, cls=PlainCommand, epilog=examples(name), hidden=measures)(command)
        if measures:
            group.command(name, cls=PlainCommand, epilog=examples(name))(command)
    if group.registered_commands:
        app.add_typer(group, name="measure")
    return app


def main(commands: Mapping[str, str] = COMMANDS, open_chat: Callable[..., int] | None = None) -> None:
    """Run the command line. Every error ends with one sentence on stderr and an exit code.

    If the words begin with a command, only that command is imported. open_chat: opens the chat with a model, settings
    by flag and a system prompt, and returns its exit code; used by `run` on a terminal.
    """
    with reported_errors():
        words = sys.argv[1:] or ["--help"]
        if words[0] == "help":
            words = [*(word for word in words[1:] if word != "help"), "--help"]
        words[0] = ALIASES.get(words[0], words[0])
        name, known = (words[1:2], MEASURES) if words[0] == "measure" else (words[:1], commands)
        if COMPLETION_VARIABLE in os.environ:
            completion_init()
        elif name and name[0] in known:
            commands = {name[0]: commands[name[0]]}
        try:
            program = application(commands)
            sys.exit(program(words, prog_name=PROGRAM, standalone_mode=False, obj=open_chat) or ExitCode.DONE)
        except _UsageError as error:
            command = error.ctx.command_path if error.ctx else PROGRAM
            message = error.format_message().replace("Value error, ", "")  # pydantic's beginning, for choices
            end = "" if message.endswith((".", "?")) else "."
            raise RequestError(f"{message}{end} `{command} --help` lists arguments and options.") from error
