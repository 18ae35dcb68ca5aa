"""Which models are on this machine, and what they are."""

from pathlib import Path


def resolve(name: str) -> Path:
    """Return the file that a model's name stands for. A name is a path, in which ~ is the home folder.

    The file may be missing or of another kind: opening it says so, as gguf_io.ModelFileError.
    """
    return Path(name).expanduser()
