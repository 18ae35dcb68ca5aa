"""The `localllm agent` command. Heavy imports are deferred until it runs."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from gguf_io.system import is_terminal, pip_line
from localllm.errors import RequestError
from localllm.front.options import COMPUTING, Remote, model_names, setting_flags, with_flags


@with_flags(COMPUTING, after="model")
def agent(
    given: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Name, path or URL (the last one used).", autocompletion=model_names)
    ] = None,
    remote: Remote = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Use a localllm or Ollama server.")] = None,
    sessions: Annotated[Path | None, typer.Option(metavar="FILE", help="Store the sessions in this file.")] = None,
) -> None:
    """Serve an editor as its agent.

    Speaks the Agent Client Protocol on stdin and stdout. Zed, JetBrains' editors, Neovim and toad start this command.
    The model gets the chat's tools; the editor asks before changes and commands.
    """
    if importlib.util.find_spec("acp") is None:
        install = pip_line("install", "agent-client-protocol>=0.12")
        raise RequestError(f"The agent for editors needs the extra agent: {install}")
    if is_terminal(sys.stdin):
        raise RequestError("An editor starts this command and speaks to it. To chat in the terminal: `localllm chat`.")
    from tui.acp.run import run_agent

    run_agent(model, {**setting_flags(given), "host": None}, sessions, host)
