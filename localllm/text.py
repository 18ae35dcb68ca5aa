"""Text for people: sizes and counts, tables, and foreign text made safe to show."""

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence

# C0, DEL and C1 without tab and newlines: text from a model or a file must not move the cursor or set a title.
# Bidirectional overrides and isolates: they display text in another order.
_UNSAFE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")


BOOLEANS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
LEAST_PART = 3  # characters of a name that is looked for inside of others


def harmless(text: str) -> str:
    """The text with U+FFFD for every character that controls a terminal or reorders the display."""
    return _UNSAFE.sub("\ufffd", text)


def shortened(text: str, most: int = 80) -> str:
    """The text, cut to `most` characters with an ellipsis: messages quote foreign text of any length."""
    return text if len(text) <= most else f"{text[:most]}…"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that an unknown one probably means; None if none is like it.

    One that begins with the unknown name, else one that has it inside, else the most similar by edits. Case and the
    signs between words do not matter. Of several, the shortest. cutoff: the least similarity, 0 to 1.
    """
    wanted = _words(name[:200])
    spelt = {_words(one): one for one in sorted(known, key=len, reverse=True)}
    if len(wanted) >= LEAST_PART:
        inside = [one for one in spelt if wanted in one]
        begun = [one for one in inside if one.startswith(wanted)]
        if found := begun or inside:
            return spelt[min(found, key=len)]
    return next((spelt[one] for one in difflib.get_close_matches(wanted, spelt, n=1, cutoff=cutoff)), None)


def _words(name: str) -> str:
    """A name in lower case with one sign between its words."""
    return re.sub(r"[\W_]+", "-", name.lower())


def columns_of(text: str) -> int:
    """Terminal columns of a text: East Asian letters and emoji take two, combining marks and format characters none."""
    if text.isascii():
        return len(text)
    narrow = sum(1 for letter in text if not unicodedata.combining(letter) and unicodedata.category(letter) != "Cf")
    return narrow + sum(1 for letter in text if unicodedata.east_asian_width(letter) in "WF")


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Lines of columns as wide as their widest cell, two spaces between them. right: columns aligned to the right."""
    widths = [max(map(columns_of, column)) for column in zip(*rows, strict=True)]

    def cell(column: int, text: str) -> str:
        room = " " * (widths[column] - columns_of(text))
        return room + text if column in right else text + room

    return "".join("  ".join(cell(*item) for item in enumerate(row)).rstrip() + "\n" for row in rows)


def counted(number: int, what: str) -> str:
    """1 token, 2 tokens."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def human_bytes(size: int) -> str:
    """A size with a binary unit: 512 B, 1.5 MiB, 12 GiB."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def human_count(count: int) -> str:
    """A count with a decimal unit: 512, 260 K, 1.1 B."""
    return _scaled(count, 1000, ("", "K", "M", "B", "T"))


def human_speed(speed: float) -> str:
    """Tokens per second with the precision of an estimate: 3.4, 52, 1,200."""
    return f"{speed:.1f}" if speed < 10 else f"{speed:,.0f}"


def human_seconds(seconds: float) -> str:
    """A short time with three digits: 1.25 s, 340 ms, 4.2 ms."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.{0 if seconds >= 0.01 else 1}f} ms"


def human_time(seconds: float) -> str:
    """A long time in two units at most: 42 s, 3 min 5 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _scaled(number: int, base: int, units: Sequence[str]) -> str:
    """Three significant digits; 999.6 K becomes 1 M, to which it rounds."""
    power = 0
    value = float(number)
    while power < len(units) - 1 and round(value) >= 1000:
        value /= base
        power += 1
    return f"{value:.3g} {units[power]}".strip()
