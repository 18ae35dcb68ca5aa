"""A bound on the text that a regular expression can force, which its few characters do not show: (a{1000}){1000}."""

import re

from localllm.errors import RequestError

MAX_LENGTH = 20_000
COUNT = re.compile(r"\{\s*(\d+)\s*(,\s*\d*\s*)?\}")


def check_regex(pattern: str, where: str) -> None:
    """Raise RequestError if the pattern's repetitions demand too long a text. Its syntax is not checked here."""
    length = demanded_length(pattern)
    if length > MAX_LENGTH:
        raise RequestError(
            f"{where} demands up to {length} characters through its repetitions; at most {MAX_LENGTH} are allowed."
        )


def demanded_length(pattern: str) -> int:
    """Return an upper bound of the shortest match's length: alternatives add up and optional parts count once."""
    outer: list[int] = []
    total = last = position = 0
    while position < len(pattern):
        character = pattern[position]
        count = COUNT.match(pattern, position)
        if character == "(":
            outer.append(total)
            total = last = 0
        elif character == ")" and outer:
            total, last = outer.pop() + total, total
        elif count:
            repeats = max(int(count[1]), 1)
            total += last * (repeats - 1)
            last *= repeats
        else:
            total, last = total + 1, 1
        position = count.end() if count else _after(pattern, position)
    return total + sum(outer)


def _after(pattern: str, position: int) -> int:
    """Where the atom at the position ends."""
    if pattern[position] == "\\":
        return position + 2
    if pattern[position] != "[":
        return position + 1
    depth = 0
    while position < len(pattern):
        if pattern[position] == "\\":
            position += 1
        elif pattern[position] == "[":
            depth += 1
        elif pattern[position] == "]":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return position
