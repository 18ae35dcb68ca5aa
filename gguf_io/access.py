"""Windows' access lists in text (SDDL, see Microsoft's Security Descriptor String Format): who may write to a file."""

import re

# The machine's own: the system, administrators, the installer, the owner's rights, and the owner to be of new entries.
_TRUSTED = {"SY", "BA", "LA", "OW", "CO", "S-1-3-4", "S-1-3-0", "S-1-5-18", "S-1-5-32-544"}
_INSTALLER = "S-1-5-80-956008885-3418522649-1831038044-1853292631-2271478464"
_ALLOWING = {"A", "OA", "XA"}
_WRITING_WORDS = {"GA", "GW", "FA", "FW", "WD", "WO", "SD", "DC", "LC", "RP", "DT"}
# FILE_WRITE_DATA, FILE_APPEND_DATA, FILE_WRITE_EA, FILE_DELETE_CHILD, DELETE, WRITE_DAC, WRITE_OWNER, generic all/write
_WRITING_BITS = 0x2 | 0x4 | 0x10 | 0x40 | 0x10000 | 0x40000 | 0x80000 | 0x10000000 | 0x40000000
# Kind, flags, rights, two identifiers of object classes, who; perhaps a condition.
_ENTRY = re.compile(r"\((\w+);[^;]*;([^;]*);[^;]*;[^;]*;([^;)]*)")


def only_writer(descriptor: str, user: str) -> bool:
    """Whether a file belongs to `user` (a SID) or administrators, and only they can write to it.

    descriptor: its owner and access list as "O:...D:...". A file without an access list may be written by anybody.
    """
    owner = re.match(r"O:(S-[\d-]+|[A-Z]{2})", descriptor)
    _, has_list, entries = descriptor.partition("D:")
    allowed = {*_TRUSTED, _INSTALLER, user}
    if owner is None or owner[1] not in allowed or not has_list or "NO_ACCESS_CONTROL" in entries:
        return False
    return all(
        who in allowed for kind, rights, who in _ENTRY.findall(entries) if kind in _ALLOWING and _may_write(rights)
    )


def _may_write(rights: str) -> bool:
    if rights.startswith("0x"):
        return bool(int(rights, 16) & _WRITING_BITS)
    return not _WRITING_WORDS.isdisjoint(re.findall("..", rights))
