"""Selects the excerpts for a question, and their order in the prompt."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from localllm.quoting.excerpt import Excerpt
from localllm.wings.documents.embeddings import MeaningSearch
from localllm.wings.documents.index import DocumentIndex

EXCERPTS = 8
# Measured by benchmarks.ask_questions, whose figures are in docs/chat.md: the weights of meaning and words in a score,
# and the scores of the best chunk below which an answer is unlikely to be in the documents.
MEANING_WEIGHT, WORDS_WEIGHT = 0.8, 0.2
LEAST_FIT, LEAST_COVERAGE = 0.03, 0.18
_CANDIDATES = 60
PICTURE_TOKENS = 1024  # of a page that is a picture, about, unless a setting bounds them
DOUBT = "Nothing in these documents fits the question well, so the answer may not be in them."


@dataclass(frozen=True, slots=True)
class Found:
    """Excerpts in prompt order. fits: whether the best of them is likely to answer the question."""

    excerpts: list[Excerpt]
    fits: bool


@dataclass(frozen=True, slots=True)
class Ranking:
    """Chunks by their score for a question, best first, and whether the best one is likely to answer it."""

    scores: Mapping[int, float]
    fits: bool


def find_excerpts(
    index: DocumentIndex,
    question: str,
    meaning: MeaningSearch | None = None,
    count: int = EXCERPTS,
    room: int | None = None,
    tokens: Callable[[str], int | None] = lambda _text: None,
    picture_tokens: int | None = None,
) -> Found:
    """The excerpts that match a question best, in prompt order, which is stored in the index.

    All chunks of a folder that has no more than `count`. meaning: adds semantic search to BM25. room: tokens that the
    excerpts may take, counted by `tokens`, or estimated if it returns None. picture_tokens: about how many a
    page without text takes, None for a model that reads text only. Such pages are found by the names of their files
    only, so they fill the places that remain.
    """
    ranking = rank(index, question, meaning)
    wanted = list(ranking.scores)[:count]
    if index.count_chunks() <= count:
        wanted += [chunk for chunk in index.all_chunks(count) if chunk not in ranking.scores]
    if picture_tokens is not None:
        wanted = list(dict.fromkeys([*wanted, *index.textless(count)]))[:count]
    found = {one: each for one, each in index.excerpts(wanted).items() if picture_tokens or not each.is_picture}
    kept, left = [], room
    for identity in (identity for identity in wanted if identity in found):
        if left is not None:
            text = found[identity].text
            left -= (tokens(text) or len(text) // 3) if text else picture_tokens or 0
            if left < 0:
                break
        kept.append(identity)
    order = arranged(kept, index.prompts())
    if order:
        index.keep_prompt(order)
    return Found([found[identity] for identity in order], ranking.fits)


def rank(index: DocumentIndex, question: str, meaning: MeaningSearch | None = None) -> Ranking:
    """Rank chunks by their meaning and by the words that they share with a question.

    The score of a chunk is MEANING_WEIGHT times its cosine plus WORDS_WEIGHT times its BM25, divided by that of the
    best chunk and multiplied by the share of the question's words that some chunk has: one word of many says little.
    The best chunk fits if its score is LEAST_FIT above that of texts about anything, whose cosines differ between
    embedding models; without an embedding model, if LEAST_COVERAGE of the question's words, by weight, are in it.
    """
    words = index.best_words(question, _CANDIDATES)
    nearest = meaning.nearest(question, _CANDIDATES, words.scores) if meaning else None
    if nearest is None:
        return Ranking(words.scores, words.coverage >= LEAST_COVERAGE)
    # A chunk that is not embedded yet counts as the last of those that are.
    unknown = min(nearest.cosines.values())
    scores = {
        chunk: MEANING_WEIGHT * nearest.cosines.get(chunk, unknown)
        + WORDS_WEIGHT * words.scores.get(chunk, 0.0) * words.coverage
        for chunk in (*nearest.cosines, *(chunk for chunk in words.scores if chunk not in nearest.cosines))
    }
    best = max(nearest.cosines.values()) - nearest.background
    fit = MEANING_WEIGHT * best + WORDS_WEIGHT * words.coverage
    return Ranking(dict(sorted(scores.items(), key=lambda one: (-one[1], one[0]))), fit >= LEAST_FIT)


def arranged(wanted: Sequence[int], earlier: Sequence[Sequence[int]]) -> list[int]:
    """The wanted chunks, those at the beginning of an earlier prompt first.

    The keys and values of a prefix are cached, so a shared beginning is computed once. The rest is ordered by how many
    earlier prompts have it: frequent chunks come first, so that later prompts share more.
    """
    best = max((_beginning(prompt, wanted) for prompt in earlier), key=len, default=())
    uses = Counter(chunk for prompt in earlier for chunk in prompt)
    rest = [chunk for chunk in wanted if chunk not in best]
    return [*best, *sorted(rest, key=lambda chunk: (-uses[chunk], chunk))]


def _beginning(prompt: Sequence[int], wanted: Sequence[int]) -> Sequence[int]:
    """The longest beginning of a prompt that has only wanted chunks."""
    return prompt[: next((at for at, chunk in enumerate(prompt) if chunk not in wanted), len(prompt))]
