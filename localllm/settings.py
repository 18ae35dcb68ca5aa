"""The settings: one flat, typed object, from flags over environment over a TOML file.

The field `ctx` is set by the flag --ctx, else by LOCALLLM_CTX, else by `ctx = ...` in the file, else by its default.
A name that no field has is an error which tells the nearest one, so that a typo never passes for a setting.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import platformdirs

from gpu_offload.options import SplitMode
from localllm.errors import SettingsError

PREFIX = "LOCALLLM_"

# Variables that are read where they act, because no flag or file could set them in time.
OTHER_VARIABLES = frozenset({"LOCALLLM_ISA", "LOCALLLM_KERNEL_CACHE", "LOCALLLM_LLAMA_SERVER", "LOCALLLM_TEST_DATA"})

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}

Backend = Literal["auto", "native", "llama"]
KVType = Literal["f16", "q8_0"]

MAX_PORT = 2**16 - 1
LARGEST_LORA_WEIGHT = 1e3
_LEAST = {
    "gpu_layers": 0,
    "main_gpu": 0,
    "n_cpu_moe": 0,
    "ctx": 1,
    "threads": 1,
    "kv_mib": 1,
    "parallel": 1,
    "max_tokens": 0,
    "port": 0,
    "max_queue": 1,
    "max_models": 1,
    "memory_mib": 1,
    "grace_s": 0,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting. None means that the model or the machine decides.

    backend is who computes. For llama.cpp: gpu_layers counts layers on GPUs, from the end, the output being the first;
    main_gpu is the GPU that takes all of them, unless split_mode spreads layers or the rows of matrices over several;
    n_cpu_moe counts layers whose experts stay in main memory; lora lists adapters, FILE or FILE:WEIGHT, separated by
    commas; mmproj is the projector that lets the model see images, in the place of the one beside its file, or none;
    rpc lists workers on other machines, each host:port, separated by commas. remote is the address of a server
    that computes instead, remote_key the key that it asks for, or the file it stands in.
    ctx and max_tokens count tokens; threads counts threads; kv_mib is the native engine's KV budget in MiB, kv_type_k
    and kv_type_v say how keys and values are stored (where the model decides, the native engine takes f16); parallel is
    how many requests run at once; draft names a small model that guesses ahead; disk_cache keeps conversations' KV
    across restarts; model_store is the folder of pulled models, model_folders further ones to look for GGUF files in,
    separated as in PATH. Of the server: host and port to listen on; api_key, or the file it stands in, which may have
    one for each user; allow_hosts and origins, separated by commas, are further names of this machine and foreign pages
    that may call; keep_alive is how long an idle model stays, such as 5m; max_queue counts requests, max_models those
    in memory at once, memory_mib what they may take; grace_s are the seconds that requests get to end when the server
    stops. The rest are llama.cpp's sampling parameters and defaults.
    """

    backend: Backend = "auto"
    gpu_layers: int | None = None
    main_gpu: int | None = None
    split_mode: SplitMode | None = None
    n_cpu_moe: int | None = None
    lora: str = ""
    mmproj: str | None = None
    rpc: str = ""
    remote: str | None = None
    remote_key: str | None = field(default=None, repr=False)
    remote_key_file: str | None = None
    ctx: int | None = None
    threads: int | None = None
    max_tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    typical_p: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    kv_mib: int | None = None
    kv_type_k: KVType | None = None
    kv_type_v: KVType | None = None
    parallel: int = 8
    draft: str | None = None
    disk_cache: bool = True
    model_store: str | None = None
    model_folders: str = ""
    host: str = "127.0.0.1"
    port: int = 11434
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    allow_hosts: str = ""
    origins: str = ""
    keep_alive: str = "5m"
    max_queue: int = 512
    max_models: int = 3
    memory_mib: int | None = None
    grace_s: int = 30

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise SettingsError(f"{name} is {value}; the least is {least}.")
        if self.port > MAX_PORT:
            raise SettingsError(f"port is {self.port}; the most is {MAX_PORT}.")


def config_path() -> Path:
    """Where the file is looked for, e.g. ~/.config/localllm/config.toml. It need not exist."""
    return Path(platformdirs.user_config_dir("localllm", appauthor=False)) / "config.toml"


def sessions_path() -> Path:
    """Where the chat's sessions lie, e.g. ~/.local/share/localllm/sessions.db. It need not exist."""
    return Path(platformdirs.user_data_dir("localllm", appauthor=False)) / "sessions.db"


def load_settings(
    flags: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    model: Mapping[str, object] | None = None,
) -> Settings:
    """Merge the three sources. A flag that is None was not given.

    flags: by field name. environment defaults to the process's, file to config_path(). model: what the model's own
    parameters say, below all three.
    Raises SettingsError, naming the source and the setting, for an unknown name or a value of the wrong type.
    """
    values = {name: _checked(name, value, "the model's parameters") for name, value in (model or {}).items()}
    values |= _from_file(file or config_path())
    values |= _from_environment(os.environ if environment is None else environment)
    values |= {name: _checked(name, value, "command line") for name, value in flags.items() if value is not None}
    return Settings(**values)


def setting_sources(
    environment: Mapping[str, str] | None = None, file: Path | None = None
) -> dict[str, tuple[object, str]]:
    """Every setting's value and where it comes from, where no flag says otherwise: a variable, a file, or "default".

    Raises SettingsError as load_settings does.
    """
    path = file or config_path()
    environment = os.environ if environment is None else environment
    settings = load_settings({}, environment, path)
    from_file, from_environment = _from_file(path), _from_environment(environment)
    sources = {name: str(path) for name in from_file} | {name: f"{PREFIX}{name.upper()}" for name in from_environment}
    return {name: (getattr(settings, name), sources.get(name, "default")) for name in _TYPES}


def read_key(key: str | None, file: str | None, name: str) -> str | None:
    """A secret that a setting holds, or the file that another one, `name`, names. Raises SettingsError."""
    if file is None:
        return key or None
    path = Path(file).expanduser()
    try:
        found = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(f"{name}: {path}: cannot be read: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{name}: {path}: is not UTF-8 text (byte {error.start}).") from error
    if not found:
        raise SettingsError(f"{name}: {path} is empty.")
    return found


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # HOME may be no folder at all
        return {}
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from error
    except ValueError as error:  # tomllib's errors and UnicodeDecodeError are both
        raise SettingsError(f"{path}: is not valid TOML: {error}.") from error
    return {_known(name, str(path)): _checked(name, value, str(path)) for name, value in content.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES:
            name = _known(variable.removeprefix(PREFIX).lower(), variable)
            values[name] = _parsed(name, text, variable)
    return values


def _known(name: str, where: str) -> str:
    if name in _TYPES:
        return name
    nearest = difflib.get_close_matches(name, _TYPES, n=1, cutoff=0.5)
    hint = f"Did you mean {nearest[0]}?" if nearest else f"There are: {', '.join(_TYPES)}."
    raise SettingsError(f"{where}: there is no setting {name!r}. {hint}")


def _parsed(name: str, text: str, where: str) -> Any:
    """Read a variable's text as the field's type; the text of a Literal or a string is taken as it is."""
    for kind in _TYPES[name]:
        if kind is bool and text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                raise _wrong_type(name, text, where) from None
    return _checked(name, text, where)


def _checked(name: str, value: object, where: str) -> Any:
    """Return the value if it is one of the field's type; an integer counts as a float, true and false do not."""
    allowed = _TYPES[name]
    if value in [kind for kind in allowed if isinstance(kind, str)]:
        return value
    if type(value) in allowed:
        return value
    if type(value) is int and float in allowed:
        return float(value)
    raise _wrong_type(name, value, where)


def _wrong_type(name: str, value: object, where: str) -> SettingsError:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    wanted = " or ".join(names.get(kind, repr(kind)) for kind in _TYPES[name])
    return SettingsError(f"{where}: {name} should be {wanted} and is {value!r}.")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """What a field may hold: types, or the strings of a Literal. None cannot be written in any source."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return tuple(one for part in get_args(kind) if part is not type(None) for one in _alternatives(part))
    return (kind,)


_TYPES: dict[str, tuple[Any, ...]] = {entry.name: _alternatives(entry.type) for entry in fields(Settings)}


def parse_lora(text: str) -> list[tuple[Path, float]]:
    """Files and weights of the lora setting: FILE or FILE:WEIGHT, separated by commas. Raises SettingsError.

    A comma that belongs to a path is written as "\\,".
    """
    found = []
    for part in re.split(r"(?<!\\),", text):
        item = part.strip().replace("\\,", ",")
        path, colon, tail = item.rpartition(":")
        try:
            weight = float(tail) if colon else None
        except ValueError:  # the colon belongs to the path
            weight = None
        if weight is not None and not (path and abs(weight) <= LARGEST_LORA_WEIGHT):
            raise SettingsError(
                f"lora: {item!r} must be FILE or FILE:WEIGHT, the weight within ±{LARGEST_LORA_WEIGHT:g}."
            )
        if item:
            found.append((Path(item if weight is None else path).expanduser(), 1.0 if weight is None else weight))
    return found


def lora_text(paths: Iterable[Path]) -> str:
    """The lora setting that names these files, each with weight 1, whatever their paths hold."""
    return ",".join(f"{path}:1".replace(",", "\\,") for path in paths)
