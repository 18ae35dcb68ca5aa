"""Which models are on this machine, and what they are."""

from pathlib import Path


def resolve(name: str) -> Path:
    """Return the file that a model's name stands for, looked up with this user's settings; see docs/models.md.

    Uses no network. A name that looks like a path is returned unchecked: opening a missing or other file raises
    gguf_io.ModelFileError. Raises ModelNotFoundError for any other name without a model on this machine.
    """
    from localllm.library.lookup import find
    from localllm.settings import load_settings

    return find(name, load_settings({})).path
