"""From a question to the excerpts that go before it."""

from collections.abc import Callable, Sequence

from localllm.documents.embeddings import MeaningSearch
from localllm.documents.excerpt import Excerpt
from localllm.documents.index import DocumentIndex
from localllm.documents.order import arranged

EXCERPTS = 8
_CANDIDATES = 60
_FITTING = 24  # of the candidates may stand in a prompt where an earlier one has them
_RANK_OFFSET = 60  # reciprocal rank fusion, Cormack, Clarke and Büttcher, SIGIR 2009


def find_excerpts(
    index: DocumentIndex,
    question: str,
    meaning: MeaningSearch | None = None,
    count: int = EXCERPTS,
    room: int | None = None,
    tokens: Callable[[str], int | None] = lambda _text: None,
) -> list[Excerpt]:
    """The excerpts that fit a question best, in the order in which they are to stand in the prompt, which is kept.

    meaning: adds search by meaning to BM25. room: tokens that the excerpts may take, counted by `tokens`, or estimated
    where it does not know.
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
