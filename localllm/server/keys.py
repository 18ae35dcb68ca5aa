"""The keys that the server asks for: one, or one for each user, who then share no known prefixes.

What a request takes from the cache of another one can be told from its time and its counts. So each of several users
has a namespace of the cache, named by the key itself: a key that is replaced begins anew, and one that is shared is
one user.
"""

import hashlib
import hmac
import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from localllm.errors import SettingsError
from localllm.settings import Settings, read_key

# The namespace of the request that is being answered.
_namespace: ContextVar[str] = ContextVar("namespace", default="")

_NAMED = re.compile(r"([A-Za-z0-9._@-]{1,64}):\s+(\S+)")
_DIGEST = 16


@dataclass(frozen=True, slots=True)
class Key:
    """A key, and whose it is; "" where there is only one."""

    user: str
    secret: str = field(repr=False)


def read_keys(settings: Settings) -> tuple[Key, ...]:
    """The keys of the settings. Raises SettingsError for a file that cannot be read or holds something else.

    A file has one key, or a line `NAME: KEY` for each user; empty lines and those that begin with # do not count.
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
    """Finds out whose key a request brings, in a time that tells nothing about the keys."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = [(key.secret.encode(), _namespace_of(key) if len(keys) > 1 else "") for key in keys]

    @property
    def is_empty(self) -> bool:
        """Whether no key is asked for."""
        return not self._keys

    def admit(self, given: bytes) -> bool:
        """Whether it is one of the keys; what follows in this context is then done for its user."""
        found = [namespace for secret, namespace in self._keys if hmac.compare_digest(given, secret)]
        if found:
            _namespace.set(found[0])
        return bool(found)


def current_namespace() -> str:
    """The namespace of the cache for the request that is being answered; "" is the one that all share."""
    return _namespace.get()


def _namespace_of(key: Key) -> str:
    return hashlib.blake2b(key.secret.encode(), digest_size=_DIGEST).hexdigest()
