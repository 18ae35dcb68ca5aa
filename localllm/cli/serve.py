"""localllm serve: the REST endpoint."""

from typing import Annotated

import typer

from localllm.cli.options import Debug


def serve(
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", metavar="PATH_OR_NAME", help="Serve this model too.")
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="H", help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(metavar="P", help="Port, 0 takes any free one (11434).")] = None,
    debug: Debug = False,
) -> None:
    """Serve Ollama's, OpenAI's and Anthropic's protocols over HTTP.

    Models are loaded when they are asked for. Ctrl-C lets running requests end first, a second one does not.
    """
    from localllm.cli.terminal import note
    from localllm.server.catalog import Catalog
    from localllm.server.options import ServerOptions
    from localllm.server.serve import serve as run_server
    from localllm.settings import load_settings

    settings = load_settings({})
    options = ServerOptions(host=host or "127.0.0.1", port=11434 if port is None else port)
    catalog = Catalog(model or [], settings)
    run_server(settings, options, catalog, lambda url: note(f"localllm serves on {url}"))
