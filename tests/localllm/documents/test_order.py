"""The order of excerpts reuses the beginnings of earlier prompts, within the requested number."""

import random

from localllm.documents.search import arranged


def test_the_same_chunks_come_in_the_same_order_whatever_their_ranks() -> None:
    first = arranged([5, 3, 9], {5, 3, 9}, [])
    assert arranged([9, 5, 3], {5, 3, 9}, [first]) == first


def test_a_chunk_that_fits_stays_where_an_earlier_prompt_has_it() -> None:
    # 2 is not wanted, but a wanted one follows it.
    assert arranged([1, 3, 8], {1, 2, 3, 8}, [[1, 2, 3]]) == [1, 2, 3]
    # One that does not fit the question ends the reused part.
    assert arranged([1, 3, 8], {1, 3, 8}, [[1, 2, 3]]) == [1, 3, 8]


def test_what_comes_often_comes_first() -> None:
    assert arranged([4, 7, 9], {4, 7, 9}, [[1, 9], [2, 9], [3, 7]]) == [9, 7, 4]


def test_the_best_chunk_is_always_there_and_nothing_comes_twice() -> None:
    source = random.Random(3)
    for _ in range(500):
        ranked = source.sample(range(30), 20)
        wanted = ranked[: source.randint(1, 8)]
        earlier = [source.sample(range(30), source.randint(1, 8)) for _ in range(source.randint(0, 6))]
        order = arranged(wanted, set(ranked), earlier)
        assert wanted[0] in order
        assert len(order) == len(set(order)) == len(wanted)
        assert set(order) <= set(ranked)
        assert len(set(order) & set(wanted)) * 2 >= len(wanted)
