"""Characters of stories: their names, pronouns and forms in a sentence."""

import random
from dataclasses import dataclass

from benchmarks.training.grammar import capitalised, with_article
from benchmarks.training.tables import table

WORDS = table("words")
CHILDREN = [("girl", "she"), ("boy", "he")]
_PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her"), "it": ("it", "it", "its")}
_FEMALE = frozenset({"girl", "queen", "princess", "witch", "mermaid", "hen", "cow", "duck", "goose"})
_MALE = frozenset({"boy", "king", "prince", "knight", "wizard", "rooster", "fisherman", "postman", "snowman"})


@dataclass(frozen=True, slots=True)
class Character:
    """noun: "brave fox", without an article. name: "Milo", or "" for something unique, such as the moon."""

    noun: str
    name: str
    pronoun: str

    @property
    def short(self) -> str:
        """What the story calls the character after its first sentence."""
        return self.name or f"the {self.noun}"

    @property
    def introduced(self) -> str:
        """How the story introduces the character."""
        return f"{with_article(self.noun)} named {self.name}" if self.name else f"the {self.noun}"

    @property
    def called(self) -> str:
        """The character named by its kind only: "the fox"."""
        return f"the {self.noun.rsplit(' ', 1)[-1]}" if self.name else self.short

    def slots(self, role: str) -> dict[str, str]:
        """Template slots for a character. The hero's pronoun slots are he, him, his; the helper's she, her, hers."""
        keys = ("he", "him", "his") if role == "hero" else ("she", "her", "hers")
        return {
            role: self.short,
            f"{role}_intro": self.introduced,
            f"{role}_called": self.called,
            f"{role}_who": f"{self.name}, {with_article(self.noun)}" if self.name else self.short,
            **dict(zip(keys, _PRONOUNS[self.pronoun], strict=True)),
        }


def invented_word(rng: random.Random) -> str:
    """A word that is in no list, so that the model must copy the subject from the user's message."""
    syllables = [rng.choice(WORDS["onsets"]) + rng.choice(WORDS["vowels"]) for _ in range(rng.choice((1, 1, 2)))]
    return "".join(syllables) + str(rng.choice(WORDS["codas"]))


def pick_noun(rng: random.Random) -> str:
    """A noun for a named character; sometimes an invented one."""
    kind = rng.random()
    if kind < 0.3:
        return invented_word(rng)
    return str(rng.choice(WORDS["animals" if kind < 0.66 else "people" if kind < 0.82 else "things"]))


def named(rng: random.Random, noun: str, name: str = "", taken: str = "") -> Character:
    """A character of that kind. Without a given name, it gets one other than `taken`; the pronoun matches."""
    kind = noun.rsplit(" ", 1)[-1]
    pronoun = "she" if kind in _FEMALE else "he" if kind in _MALE else ""
    if name:
        return Character(noun, name, pronoun or ("she" if name in WORDS["she"] else "he"))
    pronoun = pronoun or rng.choice(("he", "she"))
    return Character(noun, rng.choice([other for other in WORDS[pronoun] if other != taken]), pronoun)


def unique(noun: str) -> Character:
    """A character without a name, such as the moon or the sea."""
    return Character(noun, "", "it")


def any_hero(rng: random.Random) -> Character:
    """A hero for a story whose request does not specify one."""
    if rng.random() < 0.06:
        return unique(rng.choice(WORDS["unique_things"]))
    noun = pick_noun(rng)
    return named(rng, f"{rng.choice(WORDS['adjectives'])} {noun}" if rng.random() < 0.7 else noun)


def any_helper(rng: random.Random, hero: Character) -> Character:
    """A helper with another name and of another kind than the hero."""
    while True:
        noun = rng.choice(WORDS["animals"] if rng.random() < 0.65 else WORDS["people"])
        if noun != hero.noun.rsplit(" ", 1)[-1]:
            return named(rng, f"{rng.choice(WORDS['adjectives'])} {noun}", taken=hero.name)


def child_name(rng: random.Random) -> str:
    """A child's name, sometimes an invented one."""
    return capitalised(invented_word(rng)) if rng.random() < 0.4 else str(rng.choice(WORDS["he"] + WORDS["she"]))
