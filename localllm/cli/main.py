"""The entry point: commands, and how their errors reach the user."""

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.completion import completion_init  # type: ignore[attr-defined] # the place where all of its versions have it

from localllm.cli import terminal
from localllm.cli.ask import ask
from localllm.cli.bench import bench
from localllm.cli.completion import PROGRAM, VARIABLE, completion
from localllm.cli.cost import cost
from localllm.cli.create import create
from localllm.cli.help import FIRST_STEPS, PlainCommand, examples
from localllm.cli.launch import launch
from localllm.cli.list import list_models
from localllm.cli.loadtest import loadtest
from localllm.cli.machine import cache, config, doctor
from localllm.cli.manage import copy, remove, verify
from localllm.cli.plan import plan
from localllm.cli.pull import pull
from localllm.cli.quality import perplexity, quantize
from localllm.cli.resident import ps, stop
from localllm.cli.run import run
from localllm.cli.serve import serve
from localllm.cli.show import show
from localllm.cli.simulate import simulate
from localllm.cli.terminal import ExitCode, errors_told
from localllm.cli.warm import warm
from localllm.errors import RequestError

_UsageError: Any = typer.BadParameter.__bases__[0]  # typer does not export it by name

app = typer.Typer(
    name="localllm",
    epilog=FIRST_STEPS,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,  # `completion` prints the scripts
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "ask": ask,
    "serve": serve,
    "launch": launch,
    "warm": warm,
    "show": show,
    "plan": plan,
    "list": list_models,
    "pull": pull,
    "rm": remove,
    "cp": copy,
    "verify": verify,
    "create": create,
    "cache": cache,
    "bench": bench,
    "loadtest": loadtest,
    "simulate": simulate,
    "cost": cost,
    "perplexity": perplexity,
    "quantize": quantize,
    "ps": ps,
    "stop": stop,
    "config": config,
    "completion": completion,
    "doctor": doctor,
}
for _name, _command in COMMANDS.items():
    app.command(_name, cls=PlainCommand, epilog=examples(_name))(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        terminal.answer(f"localllm {version('localllm')}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Runs language models on the machine in front of you. Without a command it opens the chat."""


def main() -> None:
    """Run the command line. Every error ends in one sentence on stderr and an exit code."""
    with errors_told():
        if VARIABLE in os.environ:
            completion_init()
        try:
            sys.exit(app(sys.argv[1:] or ["--help"], prog_name=PROGRAM, standalone_mode=False) or ExitCode.DONE)
        except _UsageError as error:
            command = error.ctx.command_path if error.ctx else PROGRAM
            message = error.format_message()
            end = "" if message.endswith((".", "?")) else "."
            raise RequestError(f"{message}{end} `{command} --help` lists arguments and options.") from error
