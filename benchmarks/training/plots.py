"""The plots of stories: six kinds, each with slots to fill. Their sentences are in tables/plots.toml."""

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.training.grammar import filled
from benchmarks.training.tables import table

# The tables from which each plot takes a row, and the slot names of the row's cells.
_ROWS: dict[str, dict[str, tuple[str, ...]]] = {
    "journey": {"goals": ("goal", "reached"), "obstacles": ("obstacle", "why", "gift", "used")},
    "skill": {"skills": ("skill", "failed", "mastered")},
    "lost": {"things": ("thing",)},
    "friend": {"games": ("played", "play")},
    "rescue": {"dangers": ("danger", "rescued")},
    "fear": {"fears": ("fear", "hid", "lesson", "brave")},
}
_KINDS = ("journey", *_ROWS)  # journeys have the most rows


@dataclass(frozen=True, slots=True)
class Plot:
    """kind: one of the six. slots: the chosen texts, in which the characters are still to be filled in."""

    kind: str
    slots: dict[str, str]

    def part(self, name: str) -> list[str]:
        """Sentence templates of a part: "start", "trouble", "help", or one of the endings "happy" and "sad"."""
        return list(table("plots")[self.kind][name])

    @property
    def facts(self) -> dict[str, str]:
        """Templates of facts that answer questions about the story."""
        return dict(table("plots")[self.kind]["facts"])

    def settled(self, people: dict[str, str]) -> dict[str, str]:
        """All slots of a story: the characters' slots, and the plot's with characters filled in."""
        return people | {name: filled(text, people) for name, text in self.slots.items()}


def any_plot(rng: random.Random) -> Plot:
    """A random plot with its slots filled."""
    kind = rng.choice(_KINDS)
    slots: dict[str, str] = {}
    for name, columns in _ROWS[kind].items():
        row: Any = rng.choice(table("plots")[kind][name])
        slots |= dict(zip(columns, [row] if isinstance(row, str) else row, strict=True))
    return Plot(kind, slots | _three_spots(rng) if kind == "lost" else slots)


def _three_spots(rng: random.Random) -> dict[str, str]:
    """Two places where a lost thing is searched for in vain, and where it is found; all different."""
    while True:
        first, second, found = (rng.choice(table("plots")["lost"]["spots"]) for _ in range(3))
        if len({first, second, found}) == 3:
            return {"first": first, "second": second, "found": found}


def known_skill(rng: random.Random) -> dict[str, str]:
    """A skill's slots: its name, how learning it fails, and what mastering it looks like."""
    return dict(zip(_ROWS["skill"]["skills"], rng.choice(table("plots")["skill"]["skills"]), strict=True))
