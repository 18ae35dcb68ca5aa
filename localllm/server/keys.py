"""API keys: a single one, or one for each user. Users do not share the prefix cache.

A request's timing and token counts reveal whether its prefix was cached, so each user has a cache namespace of their
own, derived from the key: a new key starts with an empty cache, and clients with the same key share theirs.
"""

import hashlib
import hmac
import re
from collections.abc import MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from localllm.errors import SettingsError
from localllm.settings import read_key

# The ASGI scope's key for the request's cache namespace.
NAMESPACE = "localllm.namespace"
CLIENT: ContextVar[str] = ContextVar("client", default="")
"""Sender of the current HTTP request: a user if several have keys, otherwise an address. Set by the gate."""

_NAMED = re.compile(r"([A-Za-z0-9._@-]{1,64}):\s+(\S+)")
_DIGEST = 16


@dataclass(frozen=True, slots=True)
class Key:
    """A key and its user; "" if there is only one key."""

    user: str
    secret: str = field(repr=False)


def read_keys(key: str | None, path: str | None) -> tuple[Key, ...]:
    """Read the keys that the settings api_key and api_key_file name. Raises SettingsError.

    A key file has one key, or a line `NAME: KEY` for each user; empty lines and lines starting with # are ignored.
    """
    text = read_key(key, path, "api_key_file")
    if text is None:
        return ()
    if path is None:
        return (Key("", text),)
    numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    if len(lines) == 1 and not _NAMED.fullmatch(lines[0][1]):
        return (Key("", lines[0][1]),)
    return _named(lines, path)


def _named(lines: Sequence[tuple[int, str]], where: str) -> tuple[Key, ...]:
    keys: dict[str, Key] = {}
    for number, line in lines:
        match = _NAMED.fullmatch(line)
        if match is None:
            raise SettingsError(f"api_key_file: {where}, line {number}: must be a user's name and key, as NAME: KEY.")
        # Without regard to case: a user's chats are in a file of that name.
        if match[1].casefold() in map(str.casefold, keys) or any(key.secret == match[2] for key in keys.values()):
            raise SettingsError(f"api_key_file: {where}, line {number}: repeats a name or a key.")
        keys[match[1]] = Key(match[1], match[2])
    if not keys:
        raise SettingsError(f"api_key_file: {where} contains no key.")
    return tuple(keys.values())


def namespace_of_key(given: bytes, keys: Sequence[Key]) -> str | None:
    """The cache namespace of a key's user; "" if there is one key for all. None for a wrong key, in constant time."""
    found = [key for key in keys if hmac.compare_digest(given, key.secret.encode())]
    if not found or len(keys) == 1:
        return "" if found else None
    return _namespace(found[0])


def _namespace(key: Key) -> str:
    return hashlib.blake2b(key.secret.encode(), digest_size=_DIGEST).hexdigest()


def user_of(namespace: str, keys: Sequence[Key]) -> str:
    """The name of the user with a cache namespace; "" if there is one key for all, or none."""
    return next((key.user for key in keys if namespace and _namespace(key) == namespace), "")


def namespace_of(scope: MutableMapping[str, Any]) -> str:
    """The cache namespace of an HTTP request, set by the gate; "" is shared by all."""
    return str(scope.get(NAMESPACE, ""))
