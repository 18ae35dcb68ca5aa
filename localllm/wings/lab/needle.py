"""Needle in a haystack: whether a model finds a sentence at each depth of contexts of each length.

After Kamradt (github.com/gkamradt/LLMTest_NeedleInAHaystack). The hay is made of sentences that are all different, and
the needle holds a random number, so that a right answer can only come from it.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

RESERVED = 160  # tokens for the template, the question and the answer
QUESTION = "What is the number of the lighthouse? Answer with the number alone."
_WORDS = """
baker pilot gardener teacher sailor painter miller doctor tailor farmer clerk singer smith guard weaver
repaired carried sold found painted borrowed counted cleaned measured hid moved opened described
ladder basket lamp chair kettle wagon mirror clock blanket barrel map drum bridge fence window boat
market harbour forest valley mill station garden square hill river tower field school bakery
spring summer autumn winter morning evening night rain fair harvest storm holiday
"""
_WHO, _DID, _WHAT, _WHERE, _WHEN = (line.split() for line in _WORDS.split("\n")[1:-1])
_CELL, _LEFT, _TOP = 56, 96, 64
_FOUND, _MISSED = "#2ca02c", "#d62728"


@dataclass(frozen=True, slots=True)
class Cell:
    """Trials at one place: tokens of context, the needle's depth in per cent, and how many of the trials found it."""

    length: int
    depth: int
    trials: int
    found: int


def haystack(length: int, depth: int, seed: int, count: Callable[[str], int]) -> tuple[str, str]:
    """A text of up to length - RESERVED tokens with the needle at a depth in per cent, and the needle's number.

    count: the tokens of a text.
    """
    drawn = random.Random(f"{length} {seed}")  # the same hay at all depths
    number = str(random.Random(f"{length} {depth} {seed}").randrange(10_000, 100_000))
    needle = f"The number of the lighthouse is {number}."
    room, hay = length - RESERVED - count(f" {needle}"), list[str]()
    while (room := room - count(f" {(sentence := _sentence(drawn, len(hay)))}")) >= 0:
        hay.append(sentence)
    hay.insert(round(len(hay) * depth / 100), needle)
    return " ".join(hay), number


def _sentence(drawn: random.Random, number: int) -> str:
    who, did, what, where, when = map(drawn.choice, (_WHO, _DID, _WHAT, _WHERE, _WHEN))
    return f"On day {number + 1} the {who} {did} a {what} near the {where}, before the {when}."


def search(
    lengths: Sequence[int],
    depths: Sequence[int],
    trials: int,
    count: Callable[[str], int],
    ask: Callable[[str], str],
) -> Iterator[Cell]:
    """Ask for the needle at each place. ask: the model's answer to a prompt."""
    for length in lengths:
        for depth in depths:
            found = 0
            for trial in range(trials):
                text, number = haystack(length, depth, trial, count)
                found += number in re.findall(r"\d+", ask(f"{text}\n\n{QUESTION}").replace(",", ""))
            yield Cell(length, depth, trials, found)


def picture(title: str, cells: Sequence[Cell]) -> str:
    """An SVG file: a column for each length, a row for each depth, green where the needle was found."""
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    width, height = _LEFT + _CELL * len(lengths) + 24, _TOP + _CELL * len(depths) + 48
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
        '<text x="8" y="44">depth</text>',
    ]
    for cell in cells:
        x, y = _LEFT + _CELL * lengths.index(cell.length), _TOP + _CELL * depths.index(cell.depth)
        share = cell.found / cell.trials
        square = f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="{_CELL - 2}"'
        parts += [
            f'{square} fill="{_MISSED}"/>',
            f'{square} fill="{_FOUND}" fill-opacity="{share:.2f}"/>',
            f'<text x="{x + _CELL // 2}" y="{y + _CELL // 2 + 4}" text-anchor="middle" fill="white">'
            f"{cell.found}/{cell.trials}</text>",
        ]
    for row, depth in enumerate(depths):
        parts.append(f'<text x="{_LEFT - 8}" y="{_TOP + _CELL * row + 32}" text-anchor="end">{depth} %</text>')
    for column, length in enumerate(lengths):
        x = _LEFT + _CELL * column + _CELL // 2
        parts.append(f'<text x="{x}" y="{_TOP + _CELL * len(depths) + 18}" text-anchor="middle">{length:,}</text>')
    parts += [f'<text x="{_LEFT}" y="{height - 8}">tokens of context</text>', "</svg>", ""]
    return "\n".join(parts)
