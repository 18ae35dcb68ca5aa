"""The order of excerpts reuses the beginnings of earlier prompts, and never leaves a wanted one out."""

import random

from localllm.wings.documents.search import arranged


def test_the_same_chunks_come_in_the_same_order_whatever_their_ranks() -> None:
    first = arranged([5, 3, 9], [])
    assert arranged([9, 5, 3], [first]) == first


def test_the_longest_beginning_of_an_earlier_prompt_stays() -> None:
    assert arranged([1, 3, 8], [[1, 2, 3], [8, 1], [3, 8, 2]]) == [8, 1, 3]
    assert arranged([1, 3, 8], [[2, 1, 3, 8]]) == [1, 3, 8]


def test_what_comes_often_comes_first() -> None:
    assert arranged([4, 7, 9], [[1, 9], [2, 9], [3, 7]]) == [9, 7, 4]


def test_exactly_the_wanted_chunks_are_there() -> None:
    source = random.Random(3)
    reused = 0
    for _ in range(500):
        wanted = source.sample(range(12), source.randint(1, 8))
        earlier = [source.sample(range(12), source.randint(1, 8)) for _ in range(source.randint(0, 6))]
        order = arranged(wanted, earlier)
        assert sorted(order) == sorted(wanted)
        reused += any(order[:2] == prompt[:2] for prompt in earlier)
    assert reused > 50
