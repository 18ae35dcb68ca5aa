"""Which names a JSON text has used, so that no object repeats one: a grammar cannot say that of names by pattern."""

import copy


class Keys:
    """Reads JSON while it is written. Not thread-safe."""

    def __init__(self, starts_after: bytes = b"") -> None:
        """starts_after: the text before the JSON ends with this."""
        self._before = b"" if starts_after else None
        self._starts_after = starts_after
        self._open: list[set[bytes] | None] = []  # the names of each open object; None for a list
        self._string: bytearray | None = None  # of the open string
        self._escaped = False
        self._expects_name = False
        self._in_name = False

    def fork(self) -> "Keys":
        """An independent copy in the same state."""
        return copy.deepcopy(self)

    def feed(self, data: bytes) -> None:
        """Add text."""
        if self._before is not None:
            self._before += data
            at = self._before.find(self._starts_after)
            if at < 0:
                self._before = self._before[-len(self._starts_after) :]
                return
            data, self._before = self._before[at + len(self._starts_after) :], None
        for byte in data:
            if self._string is not None:
                self._within_string(byte, self._string)
            elif byte == ord('"'):
                self._string, self._in_name = bytearray(), self._expects_name
            elif byte in b"{[":
                self._open.append(set() if byte == ord("{") else None)
                self._expects_name = byte == ord("{")
            elif byte in b"}]" and self._open:
                self._open.pop()
                self._expects_name = False
            elif byte == ord(","):
                self._expects_name = bool(self._open) and self._open[-1] is not None

    def repeats(self) -> list[bytes]:
        """The texts that would complete a name which the open object has already."""
        names = self._open[-1] if self._open else None
        if not names:
            return []
        if self._string is None:
            return [blank + b'"' + name + b'"' for name in names for blank in (b"", b" ")] if self._expects_name else []
        begun = bytes(self._string)
        return [name[len(begun) :] + b'"' for name in names if name.startswith(begun)] if self._in_name else []

    def _within_string(self, byte: int, string: bytearray) -> None:
        if self._escaped or byte != ord('"'):
            string.append(byte)
            self._escaped = byte == ord("\\") and not self._escaped
            return
        if self._in_name and self._open and (names := self._open[-1]) is not None:
            names.add(bytes(string))
        self._string, self._expects_name, self._in_name = None, False, False
