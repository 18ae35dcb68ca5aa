"""Which models are on this machine, and what they are."""

from pathlib import Path


def resolve(name: str) -> Path:
    """Return the file that a model's name stands for, looked up with this user's settings; see docs/models.md.

    Asks no network. A name that looks like a path is one, and its file may be missing or of another kind: opening it
    says so, as gguf_io.ModelFileError. Raises ModelNotFoundError for other names that nothing on this machine has.
    """
    from localllm.library.lookup import find
    from localllm.settings import load_settings

    return find(name, load_settings({})).path
