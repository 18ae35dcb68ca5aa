"""The order of excerpts in a prompt: as in an earlier prompt as far as possible, whose keys and values are kept."""

from collections import Counter
from collections.abc import Collection, Sequence

# Of the chunks that an earlier prompt begins with, this share at least must be wanted now.
_WANTED_SHARE = 0.5


def arranged(wanted: Sequence[int], fitting: Collection[int], earlier: Sequence[Sequence[int]]) -> list[int]:
    """The wanted chunks, behind the longest beginning of an earlier prompt that is worth taking over.

    wanted: the chunks that fit the question best, the best first. fitting: those that fit it well enough to stand among
    them where an earlier prompt has them, since what is computed already costs nothing. The rest is ordered by how
    many earlier prompts have it, so that what comes often comes first, and the next prompts share more.
    """
    best: Sequence[int] = ()
    for prompt in earlier:
        beginning = _beginning(prompt, wanted, fitting)
        if _gain(beginning, wanted) > _gain(best, wanted):
            best = beginning
    uses = Counter(chunk for prompt in earlier for chunk in prompt)
    rest = [chunk for chunk in wanted if chunk not in best][: max(len(wanted) - len(best), 0)]
    return [*best, *sorted(rest, key=lambda chunk: (-uses[chunk], chunk))]


def _beginning(prompt: Sequence[int], wanted: Sequence[int], fitting: Collection[int]) -> Sequence[int]:
    """The longest useful beginning of a prompt; it ends with a wanted chunk, and leaves room for the best one."""
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
