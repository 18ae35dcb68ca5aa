"""The built-in model's training text: reproducible, complete, and grammatical where that can be checked."""

import itertools
import random
import re

import pytest

from benchmarks.training.characters import any_hero
from benchmarks.training.corpus import conversation, render, texts
from benchmarks.training.grammar import filled, phrase, with_article
from benchmarks.training.story import MOODS, Story, Wanted
from benchmarks.training.talk import question, retell

SEEDS = range(40)


def story(seed: int) -> tuple[random.Random, Story]:
    rng = random.Random(seed)
    return rng, Story(rng, Wanted())


def test_a_seed_makes_the_same_text_again() -> None:
    first, again, other = (list(itertools.islice(texts(seed), 50)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert len(set(first)) == len(first)


def test_alternatives_nest_and_slots_begin_with_capitals() -> None:
    found = {phrase(random.Random(seed), "{a|b{c|d}} [x]. [X]", {"x": "the fox"}) for seed in range(60)}
    assert found == {f"{begin} the fox. The fox" for begin in ("a", "bc", "bd")}
    with pytest.raises(KeyError):
        filled("[missing]", {})


@pytest.mark.parametrize(
    ("noun", "phrase_of_it"),
    [("owl", "an owl"), ("fox", "a fox"), ("unicorn", "a unicorn"), ("honest king", "an honest king")],
)
def test_articles_follow_the_sound(noun: str, phrase_of_it: str) -> None:
    assert with_article(noun) == phrase_of_it


def test_nothing_is_left_unfilled() -> None:
    for text in itertools.islice(texts(11), 300):
        plain = (
            text.replace("'.[llama]'", "")
            .replace("git diff |", "")
            .replace("<|im_start|>", "")
            .replace("<|im_end|>", "")
        )
        assert not re.search(r"[\[\]{}]|\||  | \.| ,|None", plain), text


@pytest.mark.parametrize("mood", MOODS)
def test_stories_keep_their_people_and_their_grammar(mood: str) -> None:
    for seed in SEEDS:
        rng, told = story(seed)
        text = told.tell(rng, mood)
        assert told.hero.noun in text and told.hero.name in text
        assert told.helper.introduced.lower() in text.lower(), text
        beginnings = re.findall(r"[.!?] (\"?\w)", text)
        assert 3 <= len(beginnings) <= 30
        assert all(beginning[-1].isupper() for beginning in beginnings), text
        assert text[-1] in '.!"'


def test_a_repeated_story_is_the_same() -> None:
    for seed in SEEDS:
        rng, told = story(seed)
        first = told.tell(rng, "happy")
        _, again = retell(rng, told)
        assert told.mood != "happy"
        assert again.split(". ")[0] == first.split(". ")[0]
        assert told.helper.name in again


def test_answers_about_a_story_are_taken_from_it() -> None:
    for seed in SEEDS:
        rng, told = story(seed)
        text = told.tell(rng, "happy")
        asked, answer = question(rng, told)
        assert asked and answer
        for name in re.findall(r"\b[A-Z][a-z]{2,}\b", answer):
            if name in {told.hero.name, told.helper.name}:
                assert name in text


def test_conversations_alternate_and_end_with_an_answer() -> None:
    for seed in SEEDS:
        turns = conversation(random.Random(seed))
        roles = [turn.role for turn in turns if turn.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert render(turns).endswith("<|im_end|>\n")


def test_heroes_do_not_share_the_helper_s_name() -> None:
    for seed in SEEDS:
        _, told = story(seed)
        assert told.hero.name != told.helper.name
    assert any(any_hero(random.Random(seed)).name == "" for seed in range(200))
