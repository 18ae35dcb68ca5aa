"""Turns after a story: continue it, tell it in another mood, answer questions. Texts: tables/story_talk.toml."""

import random

from models.builtin.training.grammar import phrase
from models.builtin.training.story import Story
from models.builtin.training.tables import table

_TALK = table("story_talk")


def retell(rng: random.Random, story: Story) -> tuple[str, str]:
    """A request for the same story in another mood, and the story in that mood."""
    mood = rng.choice([mood for mood in _TALK["again"] if mood != story.mood])
    return phrase(rng, _TALK["again"][mood]), story.tell(rng, mood)


def go_on(rng: random.Random, story: Story) -> tuple[str, str]:
    """A request to continue the story, and the continuation."""
    return phrase(rng, _TALK["next"]), story.next(rng)


def question(rng: random.Random, story: Story) -> tuple[str, str]:
    """A question about the story, and its answer."""
    row = rng.choice(_TALK["question"])
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
