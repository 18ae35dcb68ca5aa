"""Selects the excerpts for a question, and their order in the prompt."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from localllm.documents.embeddings import MeaningSearch
from localllm.documents.excerpt import Excerpt
from localllm.documents.index import DocumentIndex

EXCERPTS = 8
_CANDIDATES = 60
_FITTING = 24  # best candidates, which a prompt may include because an earlier one has them
_RANK_OFFSET = 60  # reciprocal rank fusion, Cormack, Clarke and Büttcher, SIGIR 2009
# At least this share of the chunks reused from the beginning of an earlier prompt must be wanted now.
_WANTED_SHARE = 0.5


def find_excerpts(
    index: DocumentIndex,
    question: str,
    meaning: MeaningSearch | None = None,
    count: int = EXCERPTS,
    room: int | None = None,
    tokens: Callable[[str], int | None] = lambda _text: None,
) -> list[Excerpt]:
    """The excerpts that match a question best, in prompt order, which is stored in the index.

    meaning: adds semantic search to BM25. room: tokens that the excerpts may take, counted by `tokens`, or estimated if
    it returns None.
    """
    lists = [index.best_words(question, _CANDIDATES)]
    if meaning is not None:
        lists.append(meaning.best(question, _CANDIDATES))
    ranked = _fused(lists)[:_FITTING]
    found = index.excerpts(ranked)

    def fitted(identities: Sequence[int]) -> list[int]:
        kept, left = [], room
        for identity in identities:
            if left is not None:
                text = found[identity].text
                left -= tokens(text) or len(text) // 3
                if left < 0:
                    break
            kept.append(identity)
        return kept

    wanted = fitted([identity for identity in ranked if identity in found][:count])
    order = fitted(arranged(wanted, found.keys(), index.prompts()))
    if order:
        index.keep_prompt(order)
    return [found[identity] for identity in order]


def _fused(lists: Sequence[Sequence[int]]) -> list[int]:
    """One ranking of several, by the sum of reciprocal ranks."""
    scores: dict[int, float] = {}
    for ranking in lists:
        for place, identity in enumerate(ranking):
            scores[identity] = scores.get(identity, 0.0) + 1 / (_RANK_OFFSET + place)
    return sorted(scores, key=lambda identity: (-scores[identity], identity))


def arranged(wanted: Sequence[int], fitting: Collection[int], earlier: Sequence[Sequence[int]]) -> list[int]:
    """The wanted chunks, after the most useful beginning of an earlier prompt.

    The keys and values of a prefix are cached, so a shared beginning is computed once.

    wanted: the chunks that match the question best, best first. fitting: chunks that match well enough to be included
    if an earlier prompt has them, since what is already computed costs nothing. The rest is ordered by how many earlier
    prompts have it: frequent chunks come first, so that later prompts share more.
    """
    best: Sequence[int] = ()
    for prompt in earlier:
        beginning = _beginning(prompt, wanted, fitting)
        if _gain(beginning, wanted) > _gain(best, wanted):
            best = beginning
    uses = Counter(chunk for prompt in earlier for chunk in prompt)
    rest = [chunk for chunk in wanted if chunk not in best][: len(wanted) - len(best)]
    return [*best, *sorted(rest, key=lambda chunk: (-uses[chunk], chunk))]


def _beginning(prompt: Sequence[int], wanted: Sequence[int], fitting: Collection[int]) -> Sequence[int]:
    """The longest useful beginning of a prompt: it ends with a wanted chunk, and has room for the best one."""
    found, hits = 0, 0
    for length, chunk in enumerate(prompt[: len(wanted)], 1):
        if chunk in wanted:
            hits += 1
            spared = wanted[0] in prompt[:length] or length < len(wanted)
            if hits >= _WANTED_SHARE * length and spared:
                found = length
        elif chunk not in fitting:
            break
    return prompt[:found]


def _gain(beginning: Sequence[int], wanted: Sequence[int]) -> int:
    return sum(chunk in wanted for chunk in beginning)
