"""Turns besides a first story: small talk, help, unanswerable questions, and what is asked about a story.

The texts are in tables of the same names.
"""

import random

from benchmarks.training.characters import WORDS, invented_word
from benchmarks.training.grammar import capitalised, phrase
from benchmarks.training.story import Story
from benchmarks.training.tables import table

_TALK = table("small_talk")
_STORY_TALK = table("story_talk")
_HELP = table("help")
_ASKS_SMALL = ("How", "What", "Who", "Which", "Are", "Do", "Can", "Where", "Why")
_ASKS_HELP = ("How", "What", "Which", "Where", "Can", "Is", "Does", "Do", "Will", "Why", "Are", "May", "Under", "On")
_LITERAL = {"llama": "[llama]"}  # not a slot: the extra's name is written in brackets


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Small talk, and a short answer."""
    row = rng.choice(_TALK["talk"])
    text = phrase(rng, row["asked"])
    if text[-1].isalpha() and " " in text and rng.random() < 0.6:
        text += "?" if text.split()[0] in _ASKS_SMALL else "."
    return text, phrase(rng, row.get("answer", _TALK["offer"]))


def unknown(rng: random.Random) -> tuple[str, str]:
    """A question that only a larger model can answer, and advice to use one."""
    strange = invented_word(rng)
    thing = rng.choice(WORDS["things"]) if rng.random() < 0.7 else invented_word(rng)
    slots = {
        "land": rng.choice(_TALK["lands"]) if rng.random() < 0.8 else strange.capitalize(),
        "person": rng.choice(_TALK["persons"]) if rng.random() < 0.8 else strange.capitalize(),
        "work": rng.choice(_TALK["works"]),
        "number": str(rng.choice((rng.randrange(2, 20), rng.randrange(20, 1000)))),
        "thing": thing,
        "a_thing": f"the {thing}",
        "animal": rng.choice(WORDS["animals"]),
        "science": rng.choice((*_TALK["sciences"], strange)),
    }
    return phrase(rng, rng.choice(_TALK["unknown"]), slots), phrase(rng, _TALK["sorry"])


def help_turn(rng: random.Random) -> tuple[str, str]:
    """A question about localllm and its answer."""
    row = rng.choice(_HELP["help"])
    text = capitalised(phrase(rng, row["asked"].replace("[how]", _HELP["how"])))
    if " " in text and text.split()[0] in _ASKS_HELP:
        text = text.removesuffix("?") + ("?" if rng.random() < 0.8 else "")
    if rng.random() < 0.1:
        text = text.replace("localllm", "it") if "localllm" in text else f"In localllm, {text[0].lower()}{text[1:]}"
    return text, phrase(rng, row["answer"], _LITERAL)


def retell(rng: random.Random, story: Story) -> tuple[str, str]:
    """A request for the same story in another mood, and the story in that mood."""
    mood = rng.choice([mood for mood in _STORY_TALK["again"] if mood != story.mood])
    return phrase(rng, _STORY_TALK["again"][mood]), story.tell(rng, mood)


def go_on(rng: random.Random, story: Story) -> tuple[str, str]:
    """A request to continue the story, and the continuation."""
    return phrase(rng, _STORY_TALK["next"]), story.next(rng)


def question(rng: random.Random, story: Story) -> tuple[str, str]:
    """A question about the story, and its answer."""
    row = rng.choice(_STORY_TALK["question"])
    sad = story.mood == "sad"
    answer = row["sad_answer"] if sad and "sad_answer" in row else row["answer"]
    if not story.hero.name:
        answer = row.get("nameless_answer", answer)
    named = story.hero if story.hero.name else story.helper
    slots = story.slots | {
        "named": named.name,
        "named_called": named.called,
        "end": story.slots["sad_fact" if sad else "happy_fact"],
    }
    return phrase(rng, row["asked"], slots), phrase(rng, answer, slots)
