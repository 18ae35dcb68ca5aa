"""A story: characters, place and plot are fixed at creation; it can then be told in several moods and continued."""

import random
from dataclasses import dataclass

from benchmarks.training.characters import WORDS, Character, any_helper, any_hero
from benchmarks.training.grammar import capitalised, filled, phrase
from benchmarks.training.plots import Plot, any_plot
from benchmarks.training.tables import table

MOODS = ("happy", "sad", "funny", "scary", "short", "long", "bedtime")
_SPICES = {"funny": "funny", "scary": "scary", "long": "details"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user specified; empty fields are chosen at random. clause: "who loved cake"; topic: "friendship"."""

    hero: Character | None = None
    helper: Character | None = None
    place: str = ""
    clause: str = ""
    topic: str = ""
    plot: Plot | None = None


class Story:
    """A story whose sentences are chosen once, so that it stays the same when told again in another mood."""

    def __init__(self, rng: random.Random, wanted: Wanted) -> None:
        self.hero = wanted.hero or any_hero(rng)
        self.helper = wanted.helper or any_helper(rng, self.hero)
        place = wanted.place or rng.choice(WORDS["places"])
        self.topic = wanted.topic
        self._plot = wanted.plot or any_plot(rng)
        people = self.hero.slots("hero") | self.helper.slots("helper")
        self.slots = self._plot.settled(people | {"place": place, "topic": self.topic})
        self.slots |= {name: filled(text, self.slots) for name, text in self._plot.facts.items()}
        self.mood = "happy"
        self._comforted = False
        self._clause = f" {wanted.clause}" if wanted.clause else ""
        self._opening = self._open(rng)
        self._habit = self._say(rng, rng.choice(WORDS["habits"])) if rng.random() < 0.5 else ""
        self._parts = {
            part: [self._say(rng, sentence) for sentence in self._plot.part(part)]
            for part in ("start", "trouble", "help", "happy", "sad")
        }

    def _say(self, rng: random.Random, template: str) -> str:
        return phrase(rng, template, self.slots)

    def _open(self, rng: random.Random) -> str:
        once = rng.choice(("Once upon a time", "Once upon a time", "Long ago", "Many years ago"))
        if not self.hero.name:
            could = rng.choice(("still speak", "speak", "laugh and speak"))
            likes = self._say(rng, "[He] {liked it best|felt at home} [place].")
            return f"{once}, {self.hero.short} could {could} like you and me{self._clause}. {likes}"
        if self._clause or rng.random() < 0.4:
            return self._say(rng, f"{once}, there {{was|lived}} [hero_intro]{self._clause}. [He] lived [place].")
        return self._say(rng, f"{once}, [hero_intro] lived [place].")

    def tell(self, rng: random.Random, mood: str) -> str:
        """The whole story in one of MOODS, as one paragraph."""
        self.mood = mood
        self._comforted = False
        if mood == "short":
            return self._briefly()
        spice = WORDS[_SPICES[mood]] if mood in _SPICES else []
        extras = [self._say(rng, template) for template in rng.sample(spice, 2)] if spice else []
        parts = [f"This is a story about {self.topic}."] if self.topic else []
        parts += [self._opening, self._habit, *self._parts["start"], *extras[:1], *self._parts["trouble"], *extras[1:]]
        parts += self._parts["help"] + self._parts["sad" if mood == "sad" else "happy"]
        if mood == "long":
            parts.append(self.next(rng))
        if self.topic and mood != "sad":
            parts.append(self._say(rng, "And so [hero] learned {something|a lot} about [topic]."))
        closings = table("words")["closings"]
        parts.append(self._say(rng, closings.get(mood, closings["happy"])))
        return " ".join(part for part in parts if part)

    def _briefly(self) -> str:
        """The story in three to five sentences. The helper is introduced at the first mention."""
        introduced = self.slots | {"helper": self.helper.introduced}
        rescue = self._plot.kind == "rescue"
        facts = self._plot.facts
        trouble = filled(facts["trouble_fact"], introduced if rescue else self.slots)
        helped = filled(facts["help_fact"], self.slots if rescue else introduced)
        wish = [] if rescue else [self.slots["wish"]]
        return " ".join([self._opening, *wish, trouble, helped, self.slots["happy_fact"]])

    def next(self, rng: random.Random) -> str:
        """A continuation after the ending. The first one after a sad ending is comforting."""
        if self.mood == "sad" and not self._comforted:
            self._comforted = True
            played, _ = rng.choice(table("plots")["friend"]["games"])
            return self._say(
                rng,
                "{Many weeks later|When spring came}, there was a knock at the door. It was [helper]! "
                f"They hugged each other and {played}. And [hero] was no longer sad.",
            )
        when = phrase(rng, "{The next day|The next morning|A week later|One day in spring},")
        names = self.slots | {"they": f"{self.hero.short} and {self.helper.short}", "their": "their"}
        first, *rest = rng.sample(WORDS["sequels"], rng.choice((1, 2)))
        pronouns = self.slots | {"they": "they", "their": "their"}
        later = [capitalised(phrase(rng, text, pronouns)) for text in (*rest, rng.choice(WORDS["sequel_ends"]))]
        return " ".join([when, phrase(rng, first, names), *later])
