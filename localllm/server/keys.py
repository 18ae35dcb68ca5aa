"""API keys: one, or one for each user, who then do not share the prefix cache.

The time and the counts of a request show what it reused of another's cache. So each of several users has a namespace of
the cache, named by the key itself: a new key begins with an empty one, and people who share a key share it.
"""

import hashlib
import hmac
import re
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.errors import SettingsError
from localllm.settings import Settings, read_key

# Where an ASGI scope holds the namespace of its request.
NAMESPACE = "localllm.namespace"

_NAMED = re.compile(r"([A-Za-z0-9._@-]{1,64}):\s+(\S+)")
_DIGEST = 16


@dataclass(frozen=True, slots=True)
class Key:
    """A key, and whose it is; "" where there is only one."""

    user: str
    secret: str = field(repr=False)


def read_keys(settings: Settings) -> tuple[Key, ...]:
    """The keys of the settings. Raises SettingsError for a file that cannot be read or holds something else.

    A file has one key, or a line `NAME: KEY` for each user; empty lines and those that begin with # are ignored.
    """
    text = read_key(settings.api_key, settings.api_key_file, "api_key_file")
    if text is None:
        return ()
    if settings.api_key_file is None:
        return (Key("", text),)
    numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    if len(lines) == 1 and not _NAMED.fullmatch(lines[0][1]):
        return (Key("", lines[0][1]),)
    return _named(lines, settings.api_key_file)


def _named(lines: Sequence[tuple[int, str]], where: str) -> tuple[Key, ...]:
    keys: dict[str, Key] = {}
    for number, line in lines:
        match = _NAMED.fullmatch(line)
        if match is None:
            raise SettingsError(f"api_key_file: {where}, line {number}: should be a user's name and key, as NAME: KEY.")
        if match[1] in keys or any(key.secret == match[2] for key in keys.values()):
            raise SettingsError(f"api_key_file: {where}, line {number}: the name or the key stands there twice.")
        keys[match[1]] = Key(match[1], match[2])
    if not keys:
        raise SettingsError(f"api_key_file: {where} has no key.")
    return tuple(keys.values())


class KeyRing:
    """Finds out whose key a request brings, in a time that does not depend on the keys."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = [(key.secret.encode(), _namespace(key) if len(keys) > 1 else "") for key in keys]

    @property
    def is_empty(self) -> bool:
        """Whether no key is needed."""
        return not self._keys

    def admit(self, given: bytes) -> str | None:
        """The namespace of the key's user; "" is the one that all share. None where it is not a key."""
        found = [namespace for secret, namespace in self._keys if hmac.compare_digest(given, secret)]
        return found[0] if found else None


def namespace_of(scope: MutableMapping[str, Any]) -> str:
    """The namespace of the prefix cache for an HTTP request, as the gate has noted it; "" is the one that all share."""
    return str(scope.get(NAMESPACE, ""))


def _namespace(key: Key) -> str:
    return hashlib.blake2b(key.secret.encode(), digest_size=_DIGEST).hexdigest()
