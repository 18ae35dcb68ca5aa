"""localllm serve: the REST server."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.front.options import COMPUTING, Remote, refuse_beside_remote, setting_flags, with_flags
from localllm.front.terminal import note

if TYPE_CHECKING:
    from collections.abc import Callable

    from localllm.server.served import ServedModels


@with_flags(COMPUTING, after="slo")
def serve(  # noqa: PLR0913, PLR0917 - one parameter for each flag
    given: typer.Context,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", metavar="PATH_OR_NAME", help="Also serve this model.")
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="H", help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(metavar="P", help="Port; 0 is any free one (11434).")] = None,
    api_key_file: Annotated[str | None, typer.Option(metavar="FILE", help="File with the API key.")] = None,
    without_key: Annotated[
        bool, typer.Option("--without-key", help="Serve other machines without an API key.")
    ] = False,
    allow_hosts: Annotated[str | None, typer.Option(metavar="A,B", help="Other host names of this machine.")] = None,
    origins: Annotated[str | None, typer.Option(metavar="A,B", help="Origins of web pages that may call.")] = None,
    page_tools: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Let models use tools in this folder, approved on the page.")
    ] = None,
    keep_alive: Annotated[
        str | None, typer.Option(metavar="T", help="How long idle models stay loaded; -1 is forever (5m).")
    ] = None,
    max_models: Annotated[int | None, typer.Option(metavar="N", help="Most models in memory at once (3).")] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="BOUNDS", help="Count answers within ttft=2s,tpot=100ms in /metrics.")
    ] = None,
    semantic_cache: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Answer like questions from a store, found with this embedding model."),
    ] = None,
    remote: Remote = None,
) -> None:
    """Serve the protocols of Ollama, OpenAI and Anthropic.

    Models are loaded when requests name them. Ctrl-C waits for running requests; a second one does not. Requests need
    the API key of LOCALLLM_API_KEY, or of a file, if one is set. With --remote, the models of a server of OpenAI's
    protocol are served. Defaults are in brackets.
    """
    from localllm.server.options import checked_options, with_ollama_variables
    from localllm.server.serve import serve as run_server

    flags = setting_flags(given)
    options = checked_options(flags, without_key, with_ollama_variables(os.environ))
    settings = options.settings
    if settings.remote:
        refuse_beside_remote({**flags, "model": model or None}, ("model", "max_models"))
        from localllm.server.remote_models import models_at

        models: Callable[[], ServedModels] = models_at(settings.remote, options)
    else:
        from localllm.server.local_models import models_here

        models = models_here(model or [], options)
    what = f"serves the models of {settings.remote}" if settings.remote else "serves"
    run_server(options, models, lambda url: note(f"localllm {what} on {url}"))
