"""The settings: one flat, typed object, merged from flags over environment over a TOML file.

The field `ctx` is set by the flag --ctx, else by LOCALLLM_CTX, else by `ctx = ...` in the file, else by its default.
An unknown name is an error that suggests the nearest known one, so that a typo never goes unnoticed.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin

import platformdirs

from gpu_offload.options import SplitMode
from localllm import sampling
from localllm.errors import LocalLLMError, SettingsError
from localllm.files import read_text, user_path
from localllm.sampling import LARGEST_LORA_WEIGHT, RANGES, CommonSampling, Range
from localllm.text import BOOLEANS, nearest, shortened

PREFIX = "LOCALLLM_"

# Variables that take effect before settings are loaded, so they are read where they are used.
OTHER_VARIABLES = frozenset({"LOCALLLM_ISA", "LOCALLLM_KERNEL_CACHE", "LOCALLLM_PREFETCH"})

SECRETS = frozenset({"api_key", "remote_key", "watermark_key"})  # never shown

_FLAGS = "command line"
_MODEL = "the model's parameters"

Backend = Literal["auto", "native", "llama"]
KVType = Literal["f16", "q8_0", "q4_0"]

IMAGE_TOKENS = Range(1, 2**20)
BOUNDS = {
    **RANGES,
    "gpu_layers": Range(0, 2**16),
    "main_gpu": Range(0, 2**16),
    "n_cpu_moe": Range(0, 2**16),
    "ctx": Range(1, 2**24),
    "image_min_tokens": IMAGE_TOKENS,
    "image_max_tokens": IMAGE_TOKENS,
    "threads": Range(1, 2**16),
    "kv_mib": Range(1, 2**40),
    "packed_mib": Range(0, 2**40),
    "parallel": Range(1, 2**16),
    "pinned_percent": Range(0, 90),
    "max_tokens": Range(0, 2**31),
    "port": Range(0, 2**16 - 1),
    "max_queue": Range(1, 2**31),
    "max_models": Range(1, 2**16),
    "memory_mib": Range(1, 2**40),
    "grace_s": Range(0, 2**31),
    "semantic_threshold": Range(0, 1),
    "semantic_mib": Range(1, 2**20),
}


@dataclass(frozen=True)
class Settings(CommonSampling):
    """Every setting; MEANINGS explains them. None leaves it to the model or to the machine."""

    backend: Backend = "auto"
    gpu_layers: int | None = None
    main_gpu: int | None = None
    split_mode: SplitMode | None = None
    n_cpu_moe: int | None = None
    gpu_index: str | None = None
    lora: str = ""
    mmproj: str | None = None
    image_min_tokens: int | None = None
    image_max_tokens: int | None = None
    rpc: str = ""
    remote: str | None = None
    remote_key: str | None = field(default=None, repr=False)
    remote_key_file: str | None = None
    ctx: int | None = None
    threads: int | None = None
    max_tokens: int | None = None
    watermark_key: str | None = field(default=None, repr=False)
    thinking: bool = True
    kv_mib: int | None = None
    kv_type_k: KVType | None = None
    kv_type_v: KVType | None = None
    parallel: int = 16
    draft: str | None = None
    self_draft: bool = True
    pinned_percent: int = 25
    disk_cache: bool = True
    packed_mib: int | None = None
    from_disk: bool = False
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
    page_tools: str | None = None
    slo: str | None = None
    fallbacks: str = ""
    any_name: bool = True
    fetch_images: bool = False
    semantic_cache: str | None = None
    semantic_threshold: float = 0.95
    semantic_scope: Literal["greedy", "any"] = "greedy"
    semantic_ttl: str = "24h"
    semantic_mib: int = 64

    @property
    def kv_types(self) -> tuple[KVType | None, KVType | None]:
        """The types of keys and of values."""
        return self.kv_type_k, self.kv_type_v

    def __post_init__(self) -> None:
        for name in BOUNDS:
            if (value := getattr(self, name)) is not None:
                _check_bounds(name, value, name)


class Meaning(NamedTuple):
    """What a setting does. unset: what holds if it is None. page: where the documentation says more."""

    text: str
    unset: str = "none"
    page: str = ""


_OFFLOAD, _PACKED, _SPECULATION = "gpu.md#placing-a-model", "models.md#packed-weights", "speed.md#speculation"
_SEMANTIC, _BUDGET = "api.md#semantic-cache", "images.md#what-a-picture-may-cost"
MEANINGS = {
    **{name: Meaning(text, "random") for name, text in sampling.MEANINGS.items()},
    "backend": Meaning("native (our CPU engine), llama (llama.cpp) or auto", page="models.md#choosing-a-backend"),
    "gpu_layers": Meaning("layers on GPUs, counted from the end, the output layer first", "as many as fit", _OFFLOAD),
    "main_gpu": Meaning("put everything on this GPU, counted from 0", "the GPUs with room", _OFFLOAD),
    "split_mode": Meaning("spread over several GPUs by layer or row; none takes main_gpu only", "layer", _OFFLOAD),
    "n_cpu_moe": Meaning("keep the experts of the first N layers in main memory", "as needed", _OFFLOAD),
    "gpu_index": Meaning(
        "another index of wheels for `localllm gpu install`, which you trust", "llama-cpp-python's", "gpu.md#install"
    ),
    "lora": Meaning(
        "LoRA adapters, FILE or FILE:WEIGHT, separated by commas; a comma in a path is \\,",
        page="models.md#lora-adapters",
    ),
    "image_min_tokens": Meaning("least tokens of a picture, where the model can choose", "the model's", _BUDGET),
    "image_max_tokens": Meaning("most tokens of a picture, where the model can choose", "the model's", _BUDGET),
    "mmproj": Meaning("projector for images, or none", "the one beside the model", "models.md#images"),
    "rpc": Meaning("llama.cpp workers on other machines, HOST:PORT, separated by commas", page="remote.md#workers"),
    "remote": Meaning("address of an OpenAI-compatible server that computes instead", page="remote.md"),
    "remote_key": Meaning("key for that server"),
    "remote_key_file": Meaning("file with that key"),
    "ctx": Meaning("context length in tokens", "the model's"),
    "threads": Meaning("threads of the CPU engine", "one per core", "speed.md#threads"),
    "max_tokens": Meaning("maximum tokens of an answer", "until the end"),
    "watermark_key": Meaning(
        "secret that marks answers, so that `localllm detect` finds them", page="settings.md#watermarks"
    ),
    "thinking": Meaning("let models that can think do so, where a request does not say", page="thinking.md"),
    "kv_mib": Meaning("memory for the KV cache in MiB", "what is free"),
    "kv_type_k": Meaning(
        "type of the KV cache's keys: f16, q8_0 (53 % of the memory) or q4_0 (28 %)",
        "f16",
        "speed.md#keys-and-values-in-fewer-bits",
    ),
    "kv_type_v": Meaning("type of the KV cache's values, as for keys", "f16", "speed.md#keys-and-values-in-fewer-bits"),
    "parallel": Meaning("sequences that run at once; at most 16 with llama.cpp"),
    "draft": Meaning("draft model, or EAGLE-3 head, for speculative decoding", page=_SPECULATION),
    "self_draft": Meaning("draft with the model's own multi-token prediction layers", page=_SPECULATION),
    "pinned_percent": Meaning(
        "share of the KV cache, in memory and on disk, for prompts that requests pin", page="api.md#pinned-prompts"
    ),
    "disk_cache": Meaning("keep the KV of long prompts on disk"),
    "packed_mib": Meaning(
        "disk for packed weights in MiB, which speed up the next load; 0 keeps none",
        "a quarter of the free disk, at most 16 GiB",
        _PACKED,
    ),
    "from_disk": Meaning("run models larger than memory, with a part of the weights on disk", page=_PACKED),
    "model_store": Meaning("folder of pulled models", "~/.local/share/localllm/models on Linux"),
    "model_folders": Meaning("more folders to search for GGUF files, separated as in PATH"),
    "host": Meaning("address that `localllm serve` listens on", page="lan.md"),
    "port": Meaning("port that `localllm serve` listens on; 0 is any free one"),
    "api_key": Meaning("key that clients must send", page="lan.md"),
    "api_key_file": Meaning("file with the key, or with one key per user", page="api.md#safety"),
    "allow_hosts": Meaning("further host names of this machine, separated by commas", page="api.md#safety"),
    "origins": Meaning("web origins that may call the server, separated by commas", page="api.md#safety"),
    "keep_alive": Meaning("how long an idle model stays loaded; -1 is forever"),
    "max_queue": Meaning("running and queued answers of one client", page="api.md#safety"),
    "max_models": Meaning("loaded models at once"),
    "memory_mib": Meaning("memory of all loaded models in MiB", "what is free"),
    "grace_s": Meaning("seconds that running requests get when the server stops"),
    "page_tools": Meaning(
        "folder in which models that chat on the page may use tools, with approval", page="page.md#tools"
    ),
    "slo": Meaning("bounds that /metrics counts answers against, such as ttft=2s,tpot=100ms", page="api.md#metrics"),
    "fallbacks": Meaning(
        "names for lists of models, such as smart=qwen3:8b,http://host:8000#qwen3:8b",
        page="models.md#a-name-for-several-models",
    ),
    "fetch_images": Meaning("fetch images at URLs in requests, from public addresses only", page="api.md#safety"),
    "semantic_cache": Meaning(
        "embedding model that finds stored answers to questions with the same meaning", page=_SEMANTIC
    ),
    "semantic_threshold": Meaning("least cosine of questions with the same meaning", page=_SEMANTIC),
    "semantic_scope": Meaning(
        "greedy (the first question of a conversation at temperature 0) or any question", page=_SEMANTIC
    ),
    "semantic_ttl": Meaning("how long an answer is stored", page=_SEMANTIC),
    "semantic_mib": Meaning("disk for stored answers in MiB", page=_SEMANTIC),
    "any_name": Meaning("on a server with one model, a name that no model has means that one", page="api.md#models"),
}


def config_path() -> Path:
    """The path of the settings file, e.g. ~/.config/localllm/config.toml. It need not exist."""
    return Path(platformdirs.user_config_dir("localllm", appauthor=False)) / "config.toml"


def sessions_path() -> Path:
    """The database of the chat's sessions, e.g. ~/.local/share/localllm/sessions.db. It need not exist."""
    return Path(platformdirs.user_data_dir("localllm", appauthor=False)) / "sessions.db"


def indexes_folder() -> Path:
    """The indexes of documents' folders, e.g. ~/.local/share/localllm/documents. It need not exist."""
    return sessions_path().with_name("documents")


def journal_path() -> Path:
    """The database of the changes that tools made, e.g. ~/.local/share/localllm/changes.db. It need not exist."""
    return sessions_path().with_name("changes.db")


Report = Callable[[SettingsError], object]


def _refuse(error: SettingsError) -> NoReturn:
    raise error


def load_settings(
    flags: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    model: Mapping[str, object] | None = None,
    report: Report = _refuse,
) -> Settings:
    """Merge the three sources. A flag that is None was not given.

    flags: by field name. environment defaults to the process's, file to config_path(). model: the model's own
    parameters, with the lowest precedence. report is called with a SettingsError, which names the source and the
    setting, for each unknown name and invalid value; if it returns, that entry is skipped. By default it raises.
    """
    values = _merged(
        (((name, value, _MODEL) for name, value in (model or {}).items())),
        _from_file(file or config_path(), report),
        _from_environment(os.environ if environment is None else environment, report),
        ((name, value, _FLAGS) for name, value in flags.items() if value is not None),
        report=report,
    )
    return Settings(**{name: value for name, (value, _) in values.items()})


def setting_sources(
    environment: Mapping[str, str] | None = None, file: Path | None = None, report: Report = _refuse
) -> dict[str, tuple[object, str]]:
    """Every setting's value and its source if no flag overrides it: a variable, a file, or "default".

    report: as for load_settings.
    """
    found = _merged(
        _from_file(file or config_path(), report),
        _from_environment(os.environ if environment is None else environment, report),
        report=report,
    )
    defaults = Settings()
    return {name: found.get(name, (getattr(defaults, name), "default")) for name in _TYPES}


def read_key(key: str | None, file: str | None, name: str) -> str | None:
    """The secret `key`, or the content of `file`, the value of the setting `name`. Raises SettingsError."""
    if file is None:
        return key or None
    path = user_path(file)
    found = read_text(path, SettingsError, what=f"{name}: ", pipes=True).strip()
    if not found:
        raise SettingsError(f"{name}: {path} is empty.")
    return found


def read_toml(path: Path, kind: type[LocalLLMError]) -> dict[str, Any]:
    """A TOML file that a person wrote; {} if there is none. Raises `kind` if it cannot be read or is not TOML."""
    text = read_text(path, kind, missing="")
    if not text:  # most people have no such file
        return {}
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise kind(f"{path}: is not valid TOML: {error}.") from error


Entry = tuple[str, object, str]
"""A setting's name, its value, and where it was set."""


def _merged(*sources: Iterable[Entry], report: Report) -> dict[str, tuple[Any, str]]:
    """The valid values of all sources, with where they were set; later sources take precedence."""
    values: dict[str, tuple[Any, str]] = {}
    for name, value, where in chain(*sources):
        try:
            values[name] = _checked(name, value, where), where
        except SettingsError as error:
            report(error)
    return values


def _from_file(path: Path, report: Report) -> Iterator[Entry]:
    try:
        content = read_toml(path, SettingsError)
    except SettingsError as error:
        report(error)
        return
    for name, value in content.items():
        if name in _TYPES:
            yield name, value, str(path)
        else:
            report(_unknown(name, str(path)))


def _from_environment(environment: Mapping[str, str], report: Report) -> Iterator[Entry]:
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in _TYPES:
            yield name, _parsed(name, text), variable
        else:
            report(_unknown(name, variable))


def _unknown(name: str, where: str) -> SettingsError:
    near = nearest(name, _TYPES, cutoff=0.5)
    hint = f"Did you mean {near}?" if near else f"Choose from: {', '.join(sorted(_TYPES))}."
    return SettingsError(f"{shortened(where, 200)}: there is no setting {shortened(name)!r}. {hint}")


def _parsed(name: str, text: str) -> object:
    """A variable's text as the field's type; the text itself if it cannot be parsed, which _checked then rejects."""
    for kind in _TYPES[name]:
        if kind is bool and text.lower() in BOOLEANS:
            return BOOLEANS[text.lower()]
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                return text
    return text


def _checked(name: str, value: object, where: str) -> Any:
    """Return the value if it is valid; an integer counts as a float, true and false do not. Raises SettingsError."""
    allowed = _TYPES[name]
    subject = (
        f"--{name.replace('_', '-')}" if where == _FLAGS else where if where.startswith(PREFIX) else f"{where}: {name}"
    )
    if value in [kind for kind in allowed if isinstance(kind, str)]:
        return value
    if type(value) is int and (int in allowed or float in allowed):
        if not -(2**63) <= value < 2**64:
            raise SettingsError(f"{subject} is out of range (got {shortened(str(value))}).")
        _check_bounds(name, value, subject)
        return value if int in allowed else float(value)
    if type(value) in allowed and not (isinstance(value, str) and "\0" in value):
        if isinstance(value, float):
            _check_bounds(name, value, subject)
        return value
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    *others, last = [names.get(kind, kind) for kind in allowed]
    wanted = f"{', '.join(others)} or {last}" if others else last
    got = "" if name in SECRETS else f" (got {shortened(repr(value))})"
    raise SettingsError(f"{subject} must be {wanted}{got}.")


def _check_bounds(name: str, value: float, subject: str) -> None:
    bounds = BOUNDS.get(name)
    if bounds is not None and not bounds.low <= value <= bounds.high:
        limit = f"at least {bounds.low}" if value < bounds.low else f"at most {bounds.high}"
        raise SettingsError(f"{subject} must be {limit} (got {value}).")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """A field's allowed types, or the strings of a Literal. None is left out: no source can express it."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return tuple(one for part in get_args(kind) if part is not type(None) for one in _alternatives(part))
    return (kind,)


_TYPES: dict[str, tuple[Any, ...]] = {entry.name: _alternatives(entry.type) for entry in fields(Settings)}


def parse_lora(text: str) -> list[tuple[Path, float]]:
    """Files and weights of the lora setting: FILE or FILE:WEIGHT, separated by commas. Raises SettingsError.

    A comma within a path is written as "\\,".
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
            found.append((user_path(item if weight is None else path), 1.0 if weight is None else weight))
    return found


def lora_text(paths: Iterable[Path]) -> str:
    """The lora setting for these files, each with weight 1; works for any path."""
    return ",".join(f"{path}:1".replace(",", "\\,") for path in paths)
