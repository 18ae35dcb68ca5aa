"""localllm ps, localllm stop: the models in a running server's memory."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from localllm.cli.options import AsJson, Debug
from localllm.cli.terminal import answer, human_bytes, note

TIMEOUT_S = 60.0
FOREVER_S = 365 * 86400  # servers give models that stay a date in the far future
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # addresses to listen on that cannot be connected to


def ps(as_json: AsJson = False, debug: Debug = False) -> None:
    """List the models in the running server's memory, those that stay longest first."""
    from localllm.cli.list import table

    models = _ask("GET", "/api/ps")["models"]
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
    debug: Debug = False,
) -> None:
    """Unload a model from the running server."""
    _ask("POST", "/api/generate", {"model": name, "keep_alive": 0, "stream": False})
    note(f"unloaded {name}")


def _ask(method: str, path: str, body: dict[str, object] | None = None) -> Any:
    """The response of the server of these settings. Raises RequestError if none runs or it refuses."""
    import os

    import httpx2

    from localllm.errors import RequestError
    from localllm.server.options import server_options, with_ollama_variables
    from localllm.settings import load_settings

    options = server_options(load_settings({}, with_ollama_variables(os.environ)))
    url = f"http://{ANYWHERE.get(options.host, options.host)}:{options.port}"
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        response = httpx2.request(method, f"{url}{path}", json=body, headers=headers, timeout=TIMEOUT_S)
    except httpx2.TransportError as error:
        raise RequestError(f"No server runs at {url}. Start one with `localllm serve`.") from error
    try:
        content = response.json()
    except ValueError as error:
        raise RequestError(f"{url} does not speak localllm's or Ollama's protocol.") from error
    if response.status_code != 200:
        raise RequestError(f"{url} refuses: {content.get('error', response.reason_phrase)}")
    return content
