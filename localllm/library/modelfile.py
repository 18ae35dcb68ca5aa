"""Modelfiles: Ollama's recipes for a model.

    FROM <name, path or URL>        PARAMETER <name> <value>      TEMPLATE <text>     SYSTEM <text>
    ADAPTER <path>                  MESSAGE <role> <text>         LICENSE <text>      # a comment

Instructions may be in any case and order. Values may be between quotation marks, and text between them, or between
triple ones, may span lines.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any

from localllm.library.errors import LibraryError
from localllm.sampling import ALIASES, RANGES, CommonSampling
from localllm.text import BOOLEANS, nearest, shortened

# Supported parameters, and the type of their values. `stop` may occur many times.
SUPPORTED: dict[str, type] = {
    **{name: float if isinstance(value, float) else int for name, value in asdict(CommonSampling()).items()},
    "image_max_tokens": int,
    "image_min_tokens": int,
    "num_ctx": int,
    "num_keep": int,
    "num_predict": int,
    "num_thread": int,
    "stop": str,
}
# Ollama's other parameters: accepted so that its recipes work unchanged, and reported as unused when the model runs.
_UNUSED: dict[str, type] = {
    "draft_num_predict": int,
    "f16_kv": bool,
    "logits_all": bool,
    "low_vram": bool,
    "main_gpu": int,
    "num_batch": int,
    "num_gpu": int,
    "numa": bool,
    "penalize_newline": bool,
    "tfs_z": float,
    "use_mlock": bool,
    "use_mmap": bool,
    "vocab_only": bool,
}
PARAMETERS = SUPPORTED | _UNUSED
MAX_NUMBER = 2**63  # JSON parsers agree on integers up to this
ROLES = ("system", "user", "assistant")
MAX_MODELFILE_CHARS = 1 << 20

_QUOTES = '"""'
_VALUE = re.compile(r'(?:parameter\s+\S+|message\s+\S+|[a-z]+)\s+(".*)', re.IGNORECASE)
_BEGINS = re.compile(r"\s*(from|parameter|template|system|adapter|license|message)\s", re.IGNORECASE)
_INSTRUCTION = re.compile(r"\s*([A-Za-z]+)[ \t]+(.*)", re.DOTALL)


@dataclass(slots=True)
class Modelfile:
    """A recipe. parameters: by Ollama's names, `stop` as a list."""

    source: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    template: str | None = None
    system: str | None = None
    adapters: list[str] = field(default_factory=list)
    licenses: list[str] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)


def parse_modelfile(text: str, source: str | None = None) -> Modelfile:
    """Parse a recipe. source: replaces its FROM, if given. Raises LibraryError naming the line."""
    if len(text) > MAX_MODELFILE_CHARS:
        raise LibraryError(f"The Modelfile has {len(text)} characters, more than {MAX_MODELFILE_CHARS}.")
    recipe = Modelfile()
    for number, instruction in _instructions(text):
        match = _INSTRUCTION.fullmatch(instruction)
        if match is None:
            raise LibraryError(
                f"Modelfile, line {number}: {instruction.strip()[:60]!r} is not an instruction and a value."
            )
        try:
            _apply(recipe, match[1].upper(), match[2].strip())
        except LibraryError as error:
            raise LibraryError(f"Modelfile, line {number}: {error}") from None
    recipe.source = source or recipe.source
    if not recipe.source:
        raise LibraryError("The Modelfile has no FROM. Name a model or a GGUF file.")
    return recipe


def checked_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """A model's parameters, if their values have the types of PARAMETERS; unknown ones may be numbers or text.

    Raises LibraryError otherwise. Manifests are checked with this both when read and when written.
    """
    for name, value in values.items():
        kind = PARAMETERS.get(name)
        shown = f"the parameter {shortened(name)!r}"
        if name == "stop" or isinstance(value, list):
            texts = value if isinstance(value, list) else [value]
            if kind not in (str, None) or not all(isinstance(text, str) for text in texts):
                raise LibraryError(f"{shown} must be text, not {shortened(str(value))!r}.")
        elif (kind is None and isinstance(value, str | bool | None)) or (kind is bool and isinstance(value, bool)):
            continue
        elif kind is bool:
            raise LibraryError(f"{shown} must be true or false, not {shortened(str(value))!r}.")
        elif isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
            what = "a whole number" if kind is int else "a number"
            raise LibraryError(f"{shown} must be {what}, not {shortened(str(value))!r}.")
        elif not -MAX_NUMBER < value < MAX_NUMBER:  # also NaN
            raise LibraryError(f"{shown} is out of range: {shortened(str(value))}.")
    return dict(values)


def check_range(name: str, value: Any) -> None:
    """Raise LibraryError for a parameter that no request may have."""
    if name in RANGES and not RANGES[name].low <= value <= RANGES[name].high:
        raise LibraryError(f"{name} is {value}; it must be {RANGES[name]}.")


def _instructions(text: str) -> list[tuple[int, str]]:
    """Instructions with the numbers of their first lines; text between quotation marks belongs to one instruction."""
    found: list[tuple[int, str]] = []
    lines = list(StringIO(text))  # str.splitlines would also split at other characters
    at = 0
    while at < len(lines):
        first, line = at, lines[at]
        at += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if (quotes := _opened(line)) is not None:
            at = next((end for end in range(at, len(lines)) if lines[end].rstrip().endswith(quotes)), -1) + 1
            if not at and quotes == _QUOTES:
                raise LibraryError(f"Modelfile, line {first + 1}: the triple quotes are not closed.")
            if not at or (quotes != _QUOTES and any(map(_BEGINS.match, lines[first + 1 : at]))):
                at = first + 1  # a quotation mark that is text
        found.append((first + 1, "".join(lines[first:at])))
    return found


def _opened(line: str) -> str | None:
    """The quotation marks with which a line's value begins and does not end, so that it may go on in further lines."""
    match = _VALUE.fullmatch(line.strip())
    if match is None:
        return None
    value = match[1]
    quotes = _QUOTES if value.startswith(_QUOTES) else '"'
    return None if value.endswith(quotes) and len(value) >= 2 * len(quotes) else quotes


def _apply(recipe: Modelfile, instruction: str, value: str) -> None:
    if instruction == "FROM":
        if recipe.source:
            raise LibraryError(
                "there can be one FROM.",
                remedy="Lay a projector beside the model as mmproj.gguf, or name it with --mmproj.",
            )
        recipe.source = _unquoted(value)
    elif instruction == "PARAMETER":
        _set_parameter(recipe, value)
    elif instruction == "TEMPLATE":
        recipe.template = _unquoted(value)
    elif instruction == "SYSTEM":
        recipe.system = _unquoted(value)
    elif instruction == "ADAPTER":
        recipe.adapters.append(_unquoted(value))
    elif instruction == "LICENSE":
        recipe.licenses.append(_unquoted(value))
    elif instruction == "MESSAGE":
        role, content = _first_word(value)
        if role.lower() not in ROLES:
            raise LibraryError(f"{shortened(role)!r} is not a role; choose {', '.join(ROLES)}.")
        recipe.messages.append({"role": role.lower(), "content": _unquoted(content)})
    elif instruction != "REQUIRES":  # an Ollama version, which does not apply to localllm
        raise LibraryError(f"there is no instruction {shortened(instruction)}.")


def _set_parameter(recipe: Modelfile, text: str) -> None:
    name, raw = _first_word(text)
    name, value = ALIASES.get(name.lower(), name.lower()), _unquoted(raw)
    if name not in PARAMETERS:
        near = nearest(name, PARAMETERS)
        hint = f"Did you mean {near}?" if near else f"There are {', '.join(SUPPORTED)}."
        raise LibraryError(f"there is no parameter {shortened(name)!r}. {hint}")
    if name == "stop":
        recipe.parameters.setdefault(name, []).append(value)
        return
    kind = PARAMETERS[name]
    if kind is bool:
        if value.lower() not in BOOLEANS:
            raise LibraryError(f"{name} must be true or false, not {shortened(value)!r}.")
        recipe.parameters[name] = BOOLEANS[value.lower()]
        return
    try:
        number = kind(value)
    except ValueError:
        raise LibraryError(f"{name} must be a number, not {shortened(value)!r}.") from None
    check_range(name, number)
    recipe.parameters[name] = number


def _first_word(text: str) -> tuple[str, str]:
    """The text before the first white space, and what follows that."""
    word, *rest = text.split(None, 1)
    return word, "".join(rest)


def _unquoted(text: str) -> str:
    for quotes in (_QUOTES, '"'):
        if len(text) >= 2 * len(quotes) and text.startswith(quotes) and text.endswith(quotes):
            return text[len(quotes) : -len(quotes)]
    return text
