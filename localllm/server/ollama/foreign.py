"""Models of a server elsewhere in Ollama's words. What OpenAI's protocol does not tell stays empty."""

import hashlib
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from localllm.server.front.catalog import ForeignCatalog, ForeignEntry

# Clients refuse to offer tools to a model that does not name them, so they are named; the server refuses what it must.
CAPABILITIES = ("completion", "tools")


def tags(catalog: ForeignCatalog) -> list[dict[str, Any]]:
    """Rows of /api/tags."""
    return [_row(catalog, entry) for entry in catalog.entries()]


def show(entry: ForeignEntry) -> dict[str, Any]:
    """The answer of /api/show."""
    info: dict[str, Any] = {"general.architecture": "remote", "general.name": entry.name}
    if entry.context is not None:
        info["remote.context_length"] = entry.context
    return {
        "modelfile": f"FROM {entry.name}\n",
        "parameters": "",
        "template": "",
        "details": _details(entry),
        "model_info": info,
        "capabilities": list(CAPABILITIES),
        "modified_at": _now(),
    }


def ps(catalog: ForeignCatalog, keep_alive_s: float) -> list[dict[str, Any]]:
    """Rows of /api/ps: the models asked for lately. Which of them the server holds in memory, it does not tell."""
    now = time.monotonic()
    rows = []
    for entry in catalog.entries():
        left = max(entry.used, default=-keep_alive_s) + keep_alive_s - now
        if left > 0:
            until = datetime.now(UTC) + timedelta(seconds=min(left, 10**9))
            rows.append(
                _row(catalog, entry)
                | {
                    "expires_at": until.isoformat().replace("+00:00", "Z"),
                    "size_vram": 0,
                    "backend": "remote",
                    "backend_reason": str(catalog.server.endpoint),
                    "context_length": entry.context or 0,
                }
            )
    return rows


def _row(catalog: ForeignCatalog, entry: ForeignEntry) -> dict[str, Any]:
    name = f"{catalog.server.endpoint}\n{entry.name}"
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": _now(),
        "size": 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(entry),
    }


def _details(entry: ForeignEntry) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "remote",
        "family": "remote",
        "families": ["remote"],
        "parameter_size": "",
        "quantization_level": "",
        "context_length": entry.context or 0,
        "embedding_length": 0,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
