"""localllm ps, localllm stop: the models in a running server's memory."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from localllm.front.local_server import server_of
from localllm.front.options import AsJson
from localllm.front.terminal import answer, note
from localllm.text import human_bytes, table

FOREVER_S = 365 * 86400  # servers report an expiry far in the future for models that stay loaded

Host = Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Address of a localllm or Ollama server.")]


def ps(host: Host = None, as_json: AsJson = False) -> None:
    """List the models in a running server's memory. Those that stay longest come first."""
    models = server_of(host).ask("GET", "/api/ps")["models"]
    if as_json:
        answer(json.dumps(models, ensure_ascii=False) + "\n")
    elif models:
        now = datetime.now(UTC)
        rows = [
            (row["name"], human_bytes(row["size"]), kv(row), str(row["context_length"]), until(row, now))
            for row in models
        ]
        answer(table([("NAME", "SIZE", "KV", "CONTEXT", "UNTIL"), *rows]))
    else:
        note("No model is loaded.")


def kv(row: Mapping[str, Any]) -> str:
    """What a model's keys and values take, and the part of layers with a window; only localllm's servers tell."""
    if "kv_bytes" not in row:
        return "-"
    windows = row["kv_window_bytes"]
    return human_bytes(row["kv_bytes"]) + (f", windows {human_bytes(windows)}" if windows else "")


def until(row: Mapping[str, Any], now: datetime) -> str:
    """When a model of /api/ps will be unloaded, or the progress of its load."""
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
) -> None:
    """Unload a model from a running server."""
    server_of(host).ask("POST", "/api/generate", {"model": name, "keep_alive": 0, "stream": False})
    note(f"unloaded {name}")
