"""Conversations made by the grammar: the whole training text, reproducible from a seed.

python -m benchmarks.training.corpus --seed 7 --count 20
"""

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.training.asking import ask
from benchmarks.training.grammar import phrase
from benchmarks.training.story import MOODS, Story, Wanted
from benchmarks.training.tables import table
from benchmarks.training.talk import go_on, help_turn, question, retell, small_talk, unknown

# The prompt with which the terminal chat asks for a chat's title.
TITLE_PROMPT = "Name the subject of our conversation in at most five words. Answer with the words alone."
_MOOD_WEIGHTS = (60, 8, 7, 6, 9, 4, 6)
_END = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Turn:
    """role: "system", "user" or "assistant"."""

    role: str
    text: str


def render(turns: list[Turn]) -> str:
    """The conversation as the chat template writes it, without the beginning-of-text token."""
    return "".join(f"<|im_start|>{turn.role}\n{turn.text}{_END}\n" for turn in turns)


def _typed(rng: random.Random, text: str) -> str:
    """Vary a text as users type: lower case, "please", with or without final punctuation."""
    if text[-1].isalnum() and rng.random() < 0.45:
        text += rng.choice((".", ".", "!", " please", ", please."))
    elif text.endswith(("?", ".")) and rng.random() < 0.2:
        text = text[:-1]
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    return text


def _about_story(rng: random.Random, story: Story) -> tuple[str, str]:
    return rng.choices((go_on, question, retell), (30, 45, 25))[0](rng, story)


def _title(story: Story | None, first: str) -> str:
    if story is None:
        return " ".join(first.strip(".?! ").split()[:5])
    return "A story about " + (story.topic or story.hero.name or story.hero.short)


def conversation(rng: random.Random) -> list[Turn]:
    """A chat of one to seven questions with answers, sometimes with a system message or a title request."""
    turns = [Turn("system", phrase(rng, table("small_talk")["systems"]))] if rng.random() < 0.12 else []
    story: Story | None = None
    told = 0
    for number in range(rng.choice((1, 1, 2, 3, 3, 4, 5, 6, 7))):
        kind = rng.random()
        if story is not None and kind < 0.62:
            asked, answer = _about_story(rng, story)
        elif kind < 0.66 or (story is None and kind < 0.5):
            mood = rng.choices(MOODS, _MOOD_WEIGHTS)[0]
            asked, wanted = ask(rng, mood, again=told > 0)
            story = Story(rng, wanted)
            told += 1
            answer = story.tell(rng, mood)
        elif kind < 0.88:
            asked, answer = help_turn(rng)
        else:
            asked, answer = rng.choice((small_talk, unknown))(rng)
        turns += [Turn("user", _typed(rng, asked)), Turn("assistant", answer)]
        if number == 0 and rng.random() < 0.04:
            return [*turns, Turn("user", TITLE_PROMPT), Turn("assistant", _title(story, asked))]
    return turns


def texts(seed: int) -> Iterator[str]:
    """An endless stream of training texts: conversations, and sometimes a bare story without a chat."""
    rng = random.Random(seed)
    while True:
        if rng.random() < 0.03:
            yield Story(rng, Wanted()).tell(rng, "happy") + _END
        else:
            yield render(conversation(rng))


def main() -> None:
    """Print some conversations."""
    parser = argparse.ArgumentParser(description="Print training text.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    chosen = parser.parse_args()
    for text, _ in zip(texts(chosen.seed), range(chosen.count), strict=False):
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
