"""localllm ps, localllm stop: the models in a running server's memory."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from localllm.cli.options import AsJson, Debug
from localllm.cli.terminal import answer, note
from localllm.text import human_bytes

TIMEOUT_S = 60.0
FOREVER_S = 365 * 86400  # servers give models that stay a date in the far future
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # addresses to listen on that cannot be connected to


Host = Annotated[
    str | None, typer.Option("--host", metavar="ADDRESS", help="A server elsewhere, localllm's or Ollama's.")
]


def ps(host: Host = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """List the models in the running server's memory, those that stay longest first."""
    from localllm.text import table

    models = _ask("GET", "/api/ps", host)["models"]
    if as_json:
        answer(json.dumps(models, ensure_ascii=False) + "\n")
    elif models:
        now = datetime.now(UTC)
        rows = [(row["name"], human_bytes(row["size"]), str(row["context_length"]), until(row, now)) for row in models]
        answer(table([("NAME", "SIZE", "CONTEXT", "UNTIL"), *rows]))
    else:
        note("No model is loaded.")


def until(row: Mapping[str, Any], now: datetime) -> str:
    """When a model of /api/ps is unloaded, or its load's progress."""
    if loading := row.get("loading"):
        return f"loading, {loading['share']:.0%}"
    seconds = max((datetime.fromisoformat(row["expires_at"]) - now).total_seconds(), 0)
    if seconds > FOREVER_S:
        return "forever"
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit} from now"
    return f"{seconds:.0f} s from now"


def stop(
    name: Annotated[str, typer.Argument(help="A model that `localllm ps` lists.", show_default=False)],
    host: Host = None,
    debug: Debug = False,
) -> None:
    """Unload a model from the running server."""
    _ask("POST", "/api/generate", host, {"model": name, "keep_alive": 0, "stream": False})
    note(f"unloaded {name}")


def _ask(method: str, path: str, host: str | None, body: dict[str, object] | None = None) -> Any:
    """The response of the server at an address, else of these settings.

    Raises RequestError if none runs or it refuses.
    """
    import httpx2

    from localllm.errors import RequestError

    url, key = _server(host)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx2.request(method, f"{url}{path}", json=body, headers=headers, timeout=TIMEOUT_S)
    except httpx2.TransportError as error:
        where = "Check the address" if host else "Start one with `localllm serve`"
        raise RequestError(f"No server runs at {url}. {where}.") from error
    try:
        content = response.json()
    except ValueError as error:
        raise RequestError(f"{url} does not speak localllm's or Ollama's protocol.") from error
    if response.status_code != 200:
        raise RequestError(f"{url} refuses: {content.get('error', response.reason_phrase)}")
    return content


def _server(host: str | None) -> tuple[str, str | None]:
    """The address and the key of a server: the one named, else that of the settings."""
    import os

    from localllm.remote.connection import Endpoint
    from localllm.remote.ollama import DEFAULT_PORT
    from localllm.server.options import server_options, with_ollama_variables
    from localllm.settings import load_settings, read_key

    settings = load_settings({}, with_ollama_variables(os.environ))
    if host is not None:
        key = read_key(settings.remote_key, settings.remote_key_file, "remote_key_file")
        return str(Endpoint.parse(host, path="", port=DEFAULT_PORT)), key
    options = server_options(settings)
    return f"http://{ANYWHERE.get(options.host, options.host)}:{options.port}", options.api_key
