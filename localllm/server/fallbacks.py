"""Fallback lists: a name for several models. If one cannot answer, the next one does."""

from collections.abc import Mapping

from localllm.errors import LocalLLMError, OutOfMemoryError, QueueFullError, SettingsError
from localllm.library.errors import LibraryError
from localllm.library.names import ModelName, plain
from localllm.remote.connection import Endpoint, RemoteError
from localllm.server.errors import ModelNotFoundError

MOST_MODELS = 16

# Statuses of a remote server that mean it cannot answer now. Other errors, such as 400, are returned to the client.
_CANNOT_NOW = frozenset({404, 408, 429, *range(500, 600)} - {501})

Fallbacks = Mapping[str, tuple[str, ...]]


def goes_to_the_next(error: LocalLLMError) -> bool:
    """Whether the next model of a list should answer: this one is missing, does not fit, or has a full queue.

    For a remote model, also if its server is unreachable or fails.
    """
    if isinstance(error, RemoteError):
        return error.status is None or error.status in _CANNOT_NOW
    return isinstance(error, (ModelNotFoundError, OutOfMemoryError, QueueFullError))


def is_remote(name: str) -> bool:
    """Whether a name in a list is that of a remote server's model, as in http://host:8000#qwen3:8b."""
    return "://" in name


def split_remote(name: str) -> tuple[str, str]:
    """The server's address and its name for the model. Raises RemoteError."""
    address, _, model = name.partition("#")
    Endpoint.parse(address)
    if not model:
        raise RemoteError(f"{name!r} names no model; write http://host:port#MODEL.")
    return address, model


def parse_fallbacks(text: str) -> Fallbacks:
    """Parse the setting, such as "smart=qwen3:8b,http://host:8000#qwen3:8b; quick=...". Raises SettingsError."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, _, models = (part.strip() for part in entry.partition("="))
        listed = tuple(model.strip() for model in models.split(","))
        try:
            ModelName.parse(name)
            for model in listed:
                split_remote(model) if is_remote(model) else ModelName.parse(model)
        except (LibraryError, RemoteError) as error:
            raise SettingsError(
                f"fallbacks: {entry!r} is not a name and its models; write NAME=MODEL,MODEL; NAME=... ({error})"
            ) from error
        if plain(name) in map(plain, (*found, *listed)) or len(listed) > MOST_MODELS:
            raise SettingsError(f"fallbacks: {entry!r} repeats a name, or has more than {MOST_MODELS} models.")
        found[name] = listed
    members = {plain(model) for models in found.values() for model in models}
    if chained := [name for name in found if plain(name) in members]:
        raise SettingsError(f"fallbacks: {', '.join(sorted(chained))} is a list; a list has models only.")
    return found
