"""The entry point: commands, and how their errors reach the user."""

import os
from collections.abc import Callable
from typing import Annotated

import typer
from typer.completion import completion_init  # type: ignore[attr-defined] # the place where all of its versions have it

from localllm.cli import terminal
from localllm.cli.bench import bench
from localllm.cli.cache import cache
from localllm.cli.completion import VARIABLE, completion
from localllm.cli.config import config
from localllm.cli.cost import cost
from localllm.cli.create import create
from localllm.cli.doctor import doctor
from localllm.cli.examples import FIRST_STEPS, examples
from localllm.cli.exit_code import errors_told
from localllm.cli.help import PlainCommand
from localllm.cli.list import list_models
from localllm.cli.loadtest import loadtest
from localllm.cli.manage import copy, remove, verify
from localllm.cli.plan import plan
from localllm.cli.pull import pull
from localllm.cli.quality import perplexity, quantize
from localllm.cli.resident import ps, stop
from localllm.cli.run import run
from localllm.cli.serve import serve
from localllm.cli.show import show

app = typer.Typer(
    name="localllm",
    epilog=FIRST_STEPS,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,  # `completion` prints the scripts
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "serve": serve,
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
        app()
