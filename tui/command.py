"""The `localllm chat` command. Heavy imports are deferred until it runs."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from gguf_io.system import is_terminal, pip_line
from localllm.errors import RequestError
from localllm.front.options import COMPUTING, Remote, model_names, setting_flags, with_flags
from tui.main import model_and_prompt, open_chat


@with_flags(COMPUTING, after="prompt")
def chat(  # noqa: PLR0913, PLR0917 - one parameter for each flag
    given: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Name, path or URL (the last one used); may be left out.", autocompletion=model_names),
    ] = None,
    prompt: Annotated[str | None, typer.Argument(help="Sent at once.")] = None,
    remote: Remote = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Use a localllm or Ollama server.")] = None,
    resume: Annotated[bool, typer.Option("--continue", help="Continue the last chat.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    persona: Annotated[str | None, typer.Option(metavar="NAME", help="Use a saved persona.")] = None,
    sessions: Annotated[Path | None, typer.Option(metavar="FILE", help="Store the sessions in this file.")] = None,
    visit: Annotated[str | None, typer.Option(hidden=True)] = None,
    web: Annotated[bool, typer.Option("--web", help="Open the chat in a browser on this machine.")] = False,
) -> None:
    """Chat in the terminal; sessions are kept.

    A single argument is the prompt if it has spaces or marks such as "?" or "!", else the model.
    """
    from tui.terminal import in_browser

    if model is not None and prompt is None:
        model, prompt = model_and_prompt(model)

    flags = {**setting_flags(given), "host": None}  # here the address of a server, not where to listen
    if web:
        if importlib.util.find_spec("textual_serve") is None:
            install = pip_line("install", "textual-serve")
            raise RequestError(f"The chat in a browser needs the extra web: {install}")
        from tui.web import serve_chat

        words = sys.argv[1:]
        serve_chat([word for word in words[words.index("chat") + 1 :] if word != "--web"])
        return
    if not in_browser() and not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        raise RequestError("The chat needs a terminal. For scripts there is `localllm run`.")
    more = {"host": host, "system": system, "persona": persona, "visit": visit, "prompt": prompt}
    raise typer.Exit(open_chat(model, flags, sessions=sessions, resume=resume, **more))
