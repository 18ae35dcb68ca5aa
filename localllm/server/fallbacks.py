"""Names that stand for lists of models: where one cannot answer, the next does."""

from collections.abc import Mapping

from localllm.errors import OutOfMemoryError, QueueFullError, SettingsError
from localllm.library.errors import LibraryError
from localllm.library.names import ModelName
from localllm.server.errors import ModelNotFoundError

MOST_MODELS = 16

# What sends a request to the next model of a list: not here, does not fit into memory, or its queue is full.
CANNOT_ANSWER = (ModelNotFoundError, OutOfMemoryError, QueueFullError)

Fallbacks = Mapping[str, tuple[str, ...]]


def parse_fallbacks(text: str) -> Fallbacks:
    """The lists of the setting, as in "smart=qwen3:8b,qwen3:0.6b; quick=...". Raises SettingsError."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, _, models = (part.strip() for part in entry.partition("="))
        listed = tuple(model.strip() for model in models.split(","))
        try:
            for one in (name, *listed):
                ModelName.parse(one)
        except LibraryError as error:
            raise SettingsError(
                f"fallbacks: {entry!r} is not a name and its models; write NAME=MODEL,MODEL; NAME=... ({error})"
            ) from error
        if name in found or name in listed or len(listed) > MOST_MODELS:
            raise SettingsError(f"fallbacks: {entry!r} repeats a name, or has more than {MOST_MODELS} models.")
        found[name] = listed
    if chained := found.keys() & {model for models in found.values() for model in models}:
        raise SettingsError(f"fallbacks: {', '.join(sorted(chained))} is a list; a list has models only.")
    return found
