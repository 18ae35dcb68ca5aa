"""The server's options: from the settings, and from Ollama's environment variables where ours are not set."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from localllm.errors import RequestError, SettingsError
from localllm.files import user_path
from localllm.library.names import plain
from localllm.remote.connection import is_local, split_address
from localllm.server.fallbacks import Fallbacks, parse_fallbacks
from localllm.server.keys import Key, read_keys
from localllm.settings import PREFIX, KVType, Settings, load_settings
from localllm.slo import Slo

FOREVER = float("inf")

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_DURATION = 64
_STEP = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h)")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The settings, and what their texts mean for the server.

    hosts: further names allowed in the Host header. origins: web pages that may call; * matches anything. slo: the
    bounds that the metrics check answers against. fallbacks: lists of models by name.
    """

    settings: Settings = field(default_factory=Settings)
    keys: tuple[Key, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    keep_alive_s: float = 300.0
    slo: Slo | None = None
    fallbacks: Fallbacks = field(default_factory=dict)

    @property
    def api_key(self) -> str | None:
        """A valid key, for local programs that read the same settings; None if no key is needed."""
        return self.keys[0].secret if self.keys else None

    def models_of(self, name: str) -> tuple[str, ...]:
        """The models of the fallback list with this name; empty if no list has it."""
        return next((models for one, models in self.fallbacks.items() if plain(one) == plain(name)), ())


def parse_duration(value: str | float) -> float:
    """Parse Ollama's keep_alive: a number of seconds, or text such as "5m" or "1h30m"; negative is FOREVER.

    Raises ValueError.
    """
    if not isinstance(value, str):
        return FOREVER if value < 0 else float(value)
    text = value.strip()
    digits = text.removeprefix("-")
    invalid = ValueError(f"invalid duration {value[:32]!r}; write 300, 5m or -1")
    if not digits or len(digits) > _LONGEST_DURATION:
        raise invalid
    if digits.isascii() and digits.isdigit():
        seconds, at = float(digits), len(digits)
    else:
        seconds, at = 0.0, 0
        while step := _STEP.match(digits, at):
            seconds, at = seconds + float(step[1]) * _UNITS[step[2]], step.end()
    if at < len(digits):
        raise invalid
    return FOREVER if text != digits and seconds > 0 else seconds


def server_options(settings: Settings) -> ServerOptions:
    """The server's options from the settings. Raises SettingsError for an invalid duration, SLO, list or key file."""
    try:
        keep_alive = parse_duration(settings.keep_alive)
    except ValueError as error:
        raise SettingsError(f"keep_alive: {error}.") from error
    try:
        parse_duration(settings.semantic_ttl)
    except ValueError as error:
        raise SettingsError(f"semantic_ttl: {error}.") from error
    if settings.semantic_cache and settings.remote:
        raise SettingsError("semantic_cache answers for models of this machine only; unset it for --remote.")
    return ServerOptions(
        settings,
        keys=read_keys(settings.api_key, settings.api_key_file),
        hosts=_listed(settings.allow_hosts),
        origins=_listed(settings.origins),
        keep_alive_s=keep_alive,
        slo=_slo(settings.slo),
        fallbacks=parse_fallbacks(settings.fallbacks),
    )


def checked_options(flags: Mapping[str, object], without_key: bool, environment: Mapping[str, str]) -> ServerOptions:
    """The server's options. Raises RequestError if others could use the server without a key, unless without_key.

    Tools on the page always need a key there, and a folder.
    """
    settings = load_settings(flags, environment)
    options = server_options(settings)
    if not is_local(settings.host) and options.api_key is None and not without_key:
        raise RequestError(
            f"{settings.host} can be reached from other machines, but no API key is set. Set LOCALLLM_API_KEY or "
            "--api-key-file, or pass --without-key to let everyone use the models."
        )
    if settings.page_tools is not None:
        if not is_local(settings.host) and options.api_key is None:
            raise RequestError(
                f"{settings.host} can be reached from other machines, so tools on the page need an API key. Set "
                "LOCALLLM_API_KEY or --api-key-file, or leave out --page-tools."
            )
        if not os.path.isdir(user_path(settings.page_tools)):
            raise RequestError(f"--page-tools: there is no folder {settings.page_tools}.")
    return options


def _slo(text: str | None) -> Slo | None:
    try:
        return None if text is None else Slo.parse(text)
    except RequestError as error:
        raise SettingsError(f"slo: {error}") from error


def _listed(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


# Ollama's variables and our equivalents.
_SAME = {
    "OLLAMA_KEEP_ALIVE": "KEEP_ALIVE",
    "OLLAMA_MAX_QUEUE": "MAX_QUEUE",
    "OLLAMA_ORIGINS": "ORIGINS",
}
_ZERO_IS_AUTOMATIC = {
    "OLLAMA_NUM_PARALLEL": "PARALLEL",
    "OLLAMA_MAX_LOADED_MODELS": "MAX_MODELS",
    "OLLAMA_CONTEXT_LENGTH": "CTX",
}


def with_ollama_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, with our variables set from Ollama's where ours are not set.

    Raises SettingsError for an unsupported KV cache type or address.
    """
    found = {ours: environment[theirs] for theirs, ours in _SAME.items() if environment.get(theirs)}
    for theirs, ours in _ZERO_IS_AUTOMATIC.items():
        if environment.get(theirs, "0") not in ("", "0"):
            found[ours] = environment[theirs]
    if address := environment.get("OLLAMA_HOST"):
        found |= _host_and_port(address)
    if kind := environment.get("OLLAMA_KV_CACHE_TYPE"):
        if kind not in get_args(KVType):
            *others, last = get_args(KVType)
            raise SettingsError(f"OLLAMA_KV_CACHE_TYPE must be {', '.join(others)} or {last} (got {kind!r}).")
        found |= {"KV_TYPE_K": kind, "KV_TYPE_V": kind}
    return {f"{PREFIX}{name}": value for name, value in found.items()} | dict(environment)


def _host_and_port(address: str) -> dict[str, str]:
    """Parse OLLAMA_HOST. As in Ollama, a URL without a port has that of its scheme."""
    try:
        parts = split_address(address)
    except ValueError as error:
        raise SettingsError(f"OLLAMA_HOST: invalid address {address!r}: {error}.") from error
    if parts.scheme not in ("", "http", "https"):
        raise SettingsError(f"OLLAMA_HOST: invalid address {address!r}: write a host, HOST:PORT or http://HOST:PORT.")
    host, port = parts.hostname, parts.port
    if port is None:
        port = {"http": 80, "https": 443}.get(parts.scheme)
    return ({"HOST": host} if host else {}) | ({"PORT": str(port)} if port is not None else {})
