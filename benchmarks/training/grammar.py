"""Phrases with alternatives and slots: the notation of the story, question and answer templates."""

import random
import re
from collections.abc import Mapping

_ALTERNATIVES = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"\[(\w+)\]")


def phrase(rng: random.Random, template: str, slots: Mapping[str, str] | None = None) -> str:
    """Generate a phrase from a template: {a|b} becomes a or b, innermost first; then slots are filled."""
    while (found := _ALTERNATIVES.search(template)) is not None:
        template = template[: found.start()] + rng.choice(found[1].split("|")) + template[found.end() :]
    return filled(template, slots or {})


def filled(template: str, slots: Mapping[str, str]) -> str:
    """The template with [name] replaced by slots["name"], and [Name] by the same text capitalised.

    Raises KeyError if a slot is missing.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        text = slots[name.lower()]
        return capitalised(text) if name[0].isupper() else text

    return re.sub(r" {2,}", " ", _SLOT.sub(fill, template)).strip()


def capitalised(text: str) -> str:
    """The text with its first letter in upper case and the rest unchanged."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """A noun phrase with "a" or "an" before it, according to its first sound."""
    vowel = noun[0] in "aeiou" and not noun.startswith("uni")
    return f"{'an' if vowel or noun.startswith('honest') else 'a'} {noun}"
