"""Generates requests for a story, and what they specify of it."""

import random

from benchmarks.training.characters import (
    CHILDREN,
    WORDS,
    Character,
    any_hero,
    child_name,
    invented_word,
    named,
    pick_noun,
    unique,
)
from benchmarks.training.grammar import phrase, with_article
from benchmarks.training.plots import Plot, known_skill
from benchmarks.training.story import Wanted
from benchmarks.training.tables import table

_ASKING = table("asking")
_PLURAL_CHANGES_WORD = ("s", "y", "x", "sh", "f", "mouse", "goose")


def ask(rng: random.Random, mood: str, again: bool) -> tuple[str, Wanted]:
    """A request for a story in that mood, and what it specifies. again: it is not the chat's first request."""
    any_subject = rng.random() < 0.12
    subject, wanted = ("", Wanted()) if any_subject else _subject(rng)
    name = "ask_any" if any_subject else "ask"
    if mood == "happy":  # these templates have no slot for a mood
        plain, another = ("ask_any_plainly", "ask_another_any") if any_subject else ("ask_plainly", "ask_another")
        name = rng.choices((name, plain, another), (80, 10, 0) if not again else (45, 5, 50))[0]
    kind = phrase(rng, _ASKING["kinds"][mood])
    return phrase(rng, _ASKING[name], {"kind": f" {kind}" if kind else "", "subject": subject}), wanted


def _subject(rng: random.Random) -> tuple[str, Wanted]:
    """The text that follows "a story about", and what it specifies."""
    kinds = (
        _creature,
        _only_one,
        _child,
        _theme,
        _pair,
        _creature_in_place,
        _creature_who,
        _creature_wants,
        _named,
        _many,
    )
    return rng.choices(kinds, (40, 11, 8, 8, 8, 6, 5, 5, 5, 4))[0](rng)


def _hero(rng: random.Random) -> Character:
    while not (hero := any_hero(rng)).name:
        pass
    return hero


def _creature(rng: random.Random) -> tuple[str, Wanted]:
    hero = _hero(rng)
    return with_article(hero.noun), Wanted(hero)


def _only_one(rng: random.Random) -> tuple[str, Wanted]:
    hero = unique(invented_word(rng) if rng.random() < 0.2 else rng.choice(WORDS["unique_things"]))
    return hero.short, Wanted(hero)


def _child(rng: random.Random) -> tuple[str, Wanted]:
    kind, pronoun = rng.choice(CHILDREN)
    name = child_name(rng)
    known = name in WORDS["he"] + WORDS["she"]
    if known:
        kind, pronoun = CHILDREN[name in WORDS["he"]]
    if rng.random() < 0.5:
        return name, Wanted(Character(kind if known else "child", name, pronoun))
    noun = f"{rng.choice(WORDS['adjectives'])} {kind}" if rng.random() < 0.5 else kind
    return f"{with_article(noun)} {rng.choice(('named', 'called'))} {name}", Wanted(Character(noun, name, pronoun))


def _theme(rng: random.Random) -> tuple[str, Wanted]:
    topic = invented_word(rng) if rng.random() < 0.15 else rng.choice(WORDS["topics"])
    return topic, Wanted(topic=topic)


def _pair(rng: random.Random) -> tuple[str, Wanted]:
    first = _hero(rng)
    noun = rng.choice(WORDS["animals"]) if rng.random() < 0.7 else pick_noun(rng)
    if rng.random() < 0.5:
        noun = f"{rng.choice(WORDS['adjectives'])} {noun}"
    return f"{with_article(first.noun)} and {with_article(noun)}", Wanted(first, named(rng, noun, taken=first.name))


def _creature_in_place(rng: random.Random) -> tuple[str, Wanted]:
    hero, place = _hero(rng), rng.choice(WORDS["places"])
    lives = rng.choice(("", "who lives ", "who lived ", "that lives "))
    return f"{with_article(hero.noun)} {lives}{place}", Wanted(hero, place=place)


def _creature_who(rng: random.Random) -> tuple[str, Wanted]:
    hero, clause = _hero(rng), phrase(rng, rng.choice(_ASKING["clauses"]))
    return f"{with_article(hero.noun)} {clause}", Wanted(hero, clause=clause)


def _creature_wants(rng: random.Random) -> tuple[str, Wanted]:
    hero = _hero(rng)
    if rng.random() < 0.5:
        skill = known_skill(rng)
    else:
        deed = rng.choice(_ASKING["deeds"])
        skill = {"skill": deed, "failed": "everything went wrong", "mastered": f"did it: now [he] could {deed}"}
    learns = rng.choice(("", "", "learn to "))
    wish = f"{with_article(hero.noun)} who {rng.choice(('wants', 'wanted', 'wishes'))} to {learns}{skill['skill']}"
    return wish, Wanted(hero, plot=Plot("skill", skill))


def _named(rng: random.Random) -> tuple[str, Wanted]:
    name = child_name(rng)
    hero = named(rng, _hero(rng).noun, name)
    return f"{with_article(hero.noun)} {rng.choice(('named', 'called'))} {name}", Wanted(hero)


def _many(rng: random.Random) -> tuple[str, Wanted]:
    noun = rng.choice([animal for animal in WORDS["animals"] if not animal.endswith(_PLURAL_CHANGES_WORD)])
    return f"{noun}s", Wanted(named(rng, noun))
