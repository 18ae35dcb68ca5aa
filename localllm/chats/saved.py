"""Saved prompts and personas: plain files in the configuration folder, to edit and to share.

prompts/NAME.md holds a text. personas/NAME.toml may set `system`, any other chat parameter, and `model`.
"""

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_io.system import can_name_file, make_folder
from localllm.chats.parameters import NAMES, Parameters
from localllm.errors import RequestError
from localllm.files import listed, read_text
from localllm.settings import config_path, read_toml
from localllm.text import shortened

_NAME = re.compile(r"\w[\w.-]{0,63}")
_ENDINGS = {"prompt": ".md", "persona": ".toml"}
MAX_BYTES = 2**20
# Parameters that keep the chat's values unless the persona sets them.
OF_THE_CHAT = ("tools", "folder", "rivals", "ctx")


@dataclass(frozen=True, slots=True)
class Persona:
    """A named set of answer parameters. values: parameters by name, as text. model: "" keeps the current model."""

    values: dict[str, str]
    model: str = ""

    def over(self, present: Parameters, defaults: Parameters) -> Parameters:
        """The parameters of a chat that takes this persona, without any of a previous persona. Raises RequestError."""
        parameters = dataclasses.replace(defaults, **{name: getattr(present, name) for name in OF_THE_CHAT})
        for name, text in self.values.items():
            parameters = parameters.with_text(name, text, defaults)
        return parameters


def folder_of(kind: str) -> Path:
    """The folder of a kind ("prompt" or "persona"), e.g. ~/.config/localllm/prompts. It may not exist."""
    return config_path().parent / f"{kind}s"


def saved_names(kind: str) -> list[str]:
    """The saved names of a kind, sorted."""
    ending = _ENDINGS[kind]
    found = [path.name.removesuffix(ending) for path in listed(folder_of(kind)) if path.name.endswith(ending)]
    return sorted(name for name in found if _NAME.fullmatch(name))


def read_prompt(name: str) -> str:
    """The text of a prompt. Raises RequestError."""
    return read_text(_existing("prompt", name)).strip()


def save_prompt(name: str, text: str) -> Path:
    """Save a prompt in a new file and return its path. Raises RequestError, also if the name exists."""
    return _write("prompt", name, text.strip() + "\n")


def read_persona(name: str) -> Persona:
    """Read and validate a persona. Raises RequestError naming the file and the error in it."""
    path = _existing("persona", name)
    content = read_toml(path, RequestError)
    model = content.pop("model", "")
    if not isinstance(model, str):
        raise RequestError(f"{path}: model must be a name in quotes (got {model!r}).")
    persona = Persona({key: _as_text(path, key, value) for key, value in content.items()}, model)
    try:
        persona.over(Parameters(), Parameters())
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    return persona


def save_persona(name: str, parameters: Parameters, defaults: Parameters, model: str) -> Path:
    """Save the system prompt and the changed parameters in a new file and return its path.

    Records the model in a comment. Raises RequestError, also if the name exists or nothing was changed.
    """
    names = [key for key in NAMES if key not in OF_THE_CHAT and getattr(parameters, key) != getattr(defaults, key)]
    if not names:
        raise RequestError("Nothing differs from the model's defaults. /set system TEXT or F5 changes how it answers.")
    lines = [f"{key} = {_as_toml(getattr(parameters, key))}" for key in names]
    note = f"# model = {_as_toml(model)}  # loads this model too" if model else ""
    return _write("persona", name, "\n".join([*lines, *([note] if note else [])]) + "\n")


def rename_persona(name: str, new: str) -> None:
    """Give a persona another name. Raises RequestError, also if that exists."""
    path = _existing("persona", name)
    _write("persona", new, read_text(path))
    _remove(path)


def delete_persona(name: str) -> None:
    """Delete a persona's file. Raises RequestError."""
    _remove(_existing("persona", name))


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        raise RequestError(f"{path}: cannot be removed: {error.strerror}. Check the folder's permissions.") from error


def _as_text(path: Path, key: str, value: Any) -> str:
    """A value of the file in the text form that /set takes."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str | int | float):
        return str(value)
    raise RequestError(f"{path}: {shortened(key)} must be a text, a number, true or false.")


def _as_toml(value: Any) -> str:
    """JSON strings, numbers and booleans are valid TOML, except that TOML requires DEL to be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _path(kind: str, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise RequestError(f"{shortened(name)!r} is not a valid name: use letters, digits and _ . -, at most 64.")
    file = f"{name}{_ENDINGS[kind]}"
    if not can_name_file(file):
        raise RequestError(f"{name!r} is not a valid name on Windows, which reserves it. Use another one.")
    return folder_of(kind) / file


def _existing(kind: str, name: str) -> Path:
    path = _path(kind, name)
    if not os.path.lexists(path):
        known = ", ".join(saved_names(kind)) or f"none yet: /{kind} save NAME"
        raise RequestError(f"There is no {kind} {name}. Saved: {known}.")
    if (size := os.lstat(path).st_size) > MAX_BYTES:
        raise RequestError(f"{path}: has {size} bytes, more than {MAX_BYTES // 2**20} MiB.")
    return path


def _write(kind: str, name: str, text: str) -> Path:
    path = _path(kind, name)
    try:
        make_folder(path.parent)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise RequestError(f"{path} exists already. Edit it, or choose another name.") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}. Check the folder's permissions.") from error
    return path
