"""A conversation's answer parameters: sampler settings, limits and system prompt."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args

from localllm.engine.request import MAX_LOGPROBS, SamplingParams
from localllm.errors import RequestError
from localllm.sampling import CommonSampling, Range
from localllm.settings import BOUNDS, Settings
from localllm.text import BOOLEANS, nearest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parameters(CommonSampling):
    """Names and meanings are those of `Settings` and `SamplingParams`; None uses the model's default.

    tools: whether the model is offered tools. folder: the folder whose documents are searched. think: None uses the
    model's default. rivals: how many alternatives to record for each token.
    """

    system: str = ""
    max_tokens: int | None = None
    ctx: int | None = None
    image_min_tokens: int | None = None
    image_max_tokens: int | None = None
    think: bool | None = None
    rivals: int = 0
    tools: bool = False
    folder: str = ""

    @classmethod
    def from_settings(cls, settings: Settings) -> "Parameters":
        """The defaults from flags, environment and configuration file."""
        names = {field.name for field in dataclasses.fields(cls)}
        values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
        return cls(**{name: value for name, value in values.items() if name in names})

    @classmethod
    def from_stored(cls, values: Mapping[str, Any], defaults: "Parameters") -> "Parameters":
        """Parameters that a session stored. Ignores unknown names; invalid values fall back to the defaults."""
        kept: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            value = values.get(field.name, getattr(defaults, field.name))
            try:
                optional = value is None and NoneType in get_args(field.type)
                kept[field.name] = None if optional else _parsed(field.name, str(value))
            except RequestError as error:
                log.warning("A stored parameter is not used: %s", error)
        return dataclasses.replace(defaults, **kept)

    def rebased(self, old: "Parameters", new: "Parameters") -> "Parameters":
        """These parameters with new defaults: every value equal to that in `old` is replaced by that in `new`."""
        names = [name for name in NAMES if getattr(self, name) == getattr(old, name)]
        return dataclasses.replace(self, **{name: getattr(new, name) for name in names})

    def with_text(self, name: str, text: str, defaults: "Parameters") -> "Parameters":
        """Set one parameter from text, as /set does; "default" or "" restores the default. Raises RequestError."""
        if name not in NAMES:
            begun = " or ".join(known for known in NAMES if known.startswith(name))
            near = begun or nearest(name, NAMES)
            hint = f"Did you mean {near}?" if near else f"There are: {', '.join(NAMES)}."
            raise RequestError(f"There is no parameter {name!r}. {hint}")
        if not text or text == "default":
            return dataclasses.replace(self, **{name: getattr(defaults, name)})
        return dataclasses.replace(self, **{name: _parsed(name, text)})

    def text(self, name: str) -> str:
        """The value as `with_text` reads it."""
        value = getattr(self, name)
        if isinstance(value, bool):
            return "on" if value else "off"
        return "default" if value is None else str(value)

    def sampling(self) -> SamplingParams:
        return SamplingParams.of(self, logprobs=self.rivals or None)

    def stored(self) -> dict[str, Any]:
        """All parameters by name, as the session stores them."""
        return dataclasses.asdict(self)


NAMES = ("system", *(field.name for field in dataclasses.fields(Parameters) if field.name != "system"))

# Presets change sampler parameters only.
PRESETS: Mapping[str, Mapping[str, float]] = {
    "balanced": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "precise": {"temperature": 0.2, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    "creative": {"temperature": 1.1, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
    "greedy": {"temperature": 0.0, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}

RANGES = {**BOUNDS, "rivals": Range(0, MAX_LOGPROBS)}


def _parsed(name: str, text: str) -> Any:
    annotation = next(field.type for field in dataclasses.fields(Parameters) if field.name == name)
    kind = next((part for part in get_args(annotation) if part is not NoneType), annotation)
    if kind is str:
        return text
    if kind is bool:
        if text.lower() in BOOLEANS:
            return BOOLEANS[text.lower()]
        raise RequestError(f"{name} must be on, off or default, not {text!r}.")
    assert kind in (int, float)
    try:
        value = kind(text)
    except ValueError:
        raise RequestError(f"{name} must be {'a whole number' if kind is int else 'a number'}, not {text!r}.") from None
    if not RANGES[name].low <= value <= RANGES[name].high:
        raise RequestError(f"{name} must be {RANGES[name]}, not {text}.")
    return value
