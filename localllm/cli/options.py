"""Options that every command has."""

from typing import Annotated

import typer

from localllm.cli.terminal import log_to_stderr

Model = Annotated[str, typer.Argument(help="Name, path or URL of a model.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show debug messages, and tracebacks of errors.", callback=log_to_stderr)
]
