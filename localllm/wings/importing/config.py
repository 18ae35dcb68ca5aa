"""A checkpoint's config.json; every value is checked when it is read."""

import sys
from collections.abc import Mapping
from typing import Any

from localllm.text import shortened
from localllm.wings.importing.errors import CheckpointError
from models.sizes.reading import MAX_LAYERS

_MOST_OF_A_HEAD = 1 << 16  # far above what the engine takes; bounds tables of factors

# Names in the configurations of GPT-2, EXAONE, the first Nemotron-H, Nomic BERT, and Kimi Linear.
_OLDER_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "attention_head_dim": "head_dim",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "model_max_length": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}


class Config:
    """values: by name, older names replaced by today's. where: the file, for errors."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        older = {name: values[old] for old, name in _OLDER_NAMES.items() if old in values and values.get(name) is None}
        self.values, self.where = {**values, **older}, where

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number. Raises CheckpointError."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise CheckpointError(f"{self.where}: {name} must be a number, not {shortened(repr(value))}.")
        return float(value)

    def whole(self, name: str, default: int | None = None, *, most: int = 2**32 - 1) -> int:
        """An integer from 0 to `most`. Raises CheckpointError."""
        value = self.number(name, default)
        if value != int(value) or not 0 <= value <= most:
            raise CheckpointError(f"{self.where}: {name} must be a whole number up to {most}, not {value:g}.")
        return int(value)

    def alike(self, name: str, default: int | None = None) -> int:
        """As `whole`, but the value may be listed for each layer. Raises CheckpointError if layers differ."""
        values = self.values.get(name)
        if isinstance(values, list) and values and all(value == values[0] for value in values):
            return Config({name: values[0]}, self.where).whole(name)
        return self.whole(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean; null means the default. Raises CheckpointError."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} must be true or false, not {shortened(repr(value))}.")
        return value

    def table(self, name: str) -> "Config":
        """An object; empty if there is none. Raises CheckpointError."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {name} must be an object, not {shortened(repr(value))}.")
        return Config(value, f"{self.where}: {name}")

    def numbers(self, name: str, default: list[float] | None = None) -> list[float]:
        """A list of finite numbers. Raises CheckpointError."""
        value = self._value(name, default)
        if not isinstance(value, list):
            raise CheckpointError(f"{self.where}: {name} must be a list, not {shortened(repr(value))}.")
        return [Config({name: each}, self.where).number(name) for each in value]

    def texts(self, name: str, default: list[str] | None = None) -> list[str]:
        """A list of strings. Raises CheckpointError."""
        value = self._value(name, default)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise CheckpointError(f"{self.where}: {name} must be a list of strings, not {shortened(repr(value))}.")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def expect(self, name: str, *values: Any) -> None:
        """Raise CheckpointError unless a value is missing or one of these; the engine supports no others."""
        if (value := self.values.get(name)) is not None and value not in values:
            known = " or ".join(map(str, values))
            raise CheckpointError(f"{self.where}: {name} is {shortened(repr(value))}; only {known} can be imported.")

    def expect_all(self, **values: Any) -> None:
        """Raise CheckpointError unless each value is missing or the one given here."""
        for name, value in values.items():
            self.expect(name, value)

    @property
    def head_size(self) -> int:
        """Values per head."""
        usual = self.whole("hidden_size") // max(self.whole("num_attention_heads"), 1)
        return self.whole("head_dim", usual, most=_MOST_OF_A_HEAD)

    @property
    def layers(self) -> int:
        """The number of layers; counted if only their kinds are listed."""
        kinds = self.values.get("layers_block_type")
        return self.whole("num_hidden_layers", len(kinds) if isinstance(kinds, list) else None, most=MAX_LAYERS)

    def rope(self, kind: str | None = None) -> "Config":
        """The RoPE parameters, wherever they are stated. kind: the kind of layers, if their parameters differ."""
        stated = self.table("rope_parameters")
        if kind in stated.values:
            stated = stated.table(str(kind))
        old = self.table("rope_scaling")
        base = {"rope_theta": self.values["rope_theta"]} if "rope_theta" in self.values else {}
        return Config({**base, **old.values, **stated.values}, f"{self.where}: rope_parameters")
