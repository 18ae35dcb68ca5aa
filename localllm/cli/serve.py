"""localllm serve: the REST server."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.errors import RequestError
from localllm.files import user_path
from localllm.front.options import COMPUTING, Remote, refuse_beside_remote, setting_flags, with_flags
from localllm.front.terminal import note
from localllm.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from localllm.server.options import ServerOptions
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
    from localllm.server.options import with_ollama_variables
    from localllm.server.serve import serve as run_server

    flags = setting_flags(given)
    options = checked_options(flags, without_key, with_ollama_variables(os.environ))
    settings = options.settings
    if settings.remote:
        refuse_beside_remote({**flags, "model": model or None}, ("model", "max_models"))
        models = _remote_models(settings.remote, options)
    else:
        models = _local_models(model or [], options)
    what = f"serves the models of {settings.remote}" if settings.remote else "serves"
    run_server(options, models, lambda url: note(f"localllm {what} on {url}"))


def checked_options(
    flags: "Mapping[str, object]", without_key: bool, environment: "Mapping[str, str]"
) -> "ServerOptions":
    """The server's options. Raises RequestError if others could use the server without a key, unless without_key.

    Tools on the page always need a key there, and a folder.
    """
    from localllm.remote.connection import is_local
    from localllm.server.options import server_options

    settings = load_settings(flags, environment)
    options = server_options(settings)
    if not is_local(settings.host) and options.api_key is None and not without_key:
        raise RequestError(
            f"{settings.host} can be reached from other machines, but no API key is set. Set LOCALLLM_API_KEY or "
            "--api-key-file, or pass --without-key to let everyone use the models."
        )
    if settings.page_tools is not None:
        if not is_local(settings.host) and options.api_key is None:
            raise RequestError(
                f"{settings.host} can be reached from other machines, so tools on the page need an API key. Set "
                "LOCALLLM_API_KEY or --api-key-file, or leave out --page-tools."
            )
        if not os.path.isdir(user_path(settings.page_tools)):
            raise RequestError(f"--page-tools: there is no folder {settings.page_tools}.")
    return options


def _local_models(served: "Sequence[str]", options: "ServerOptions") -> "Callable[[], ServedModels]":
    """A factory for the models of this machine. Raises LocalLLMError if a named one cannot be served."""
    from localllm.server.catalog import Catalog
    from localllm.server.loading import MemoryLoader
    from localllm.server.local_models import LocalModels
    from localllm.server.models_manager import ModelManager

    catalog = Catalog(served, options.settings)
    return lambda: LocalModels(catalog, ModelManager(options, MemoryLoader(options.settings)))


def _remote_models(address: str, options: "ServerOptions") -> "Callable[[], ServedModels]":
    """A factory for the models of the remote server."""
    from localllm.remote.openai import OpenAIServer
    from localllm.server.remote_models import RemoteModels

    server = OpenAIServer.at(address, options.settings)
    return lambda: RemoteModels(server, options.keep_alive_s)
