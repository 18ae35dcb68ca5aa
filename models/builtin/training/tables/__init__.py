"""The texts of the grammar, one TOML file for each kind."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def table(name: str) -> dict[str, Any]:
    """What the file of that name holds; callers leave it as it is."""
    return tomllib.loads((resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8"))
