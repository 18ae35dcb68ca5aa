"""Chooses the least cosine at which two questions count as one, from pairs whose meaning a person compared."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localllm.errors import RequestError
from localllm.files import read_text
from localllm.semantic.facts import same_facts

Embed = Callable[[Sequence[str]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class QuestionPair:
    """Two questions, and whether one answer fits both."""

    one: str
    other: str
    same: bool


@dataclass(frozen=True, slots=True)
class Threshold:
    """threshold: the least cosine; above 1 if no cosine keeps the rate. The rest counts pairs at it.

    hits: of pairs with the same meaning. false_hits: of others. refused: of others, those that a differing fact refuses
    whatever the cosine is.
    """

    threshold: float
    same: int
    hits: int
    different: int
    false_hits: int
    refused: int


def read_pairs(path: Path) -> list[QuestionPair]:
    """Lines of JSON: {"a": text, "b": text, "same": true or false}. Raises RequestError naming the line."""
    found = []
    for number, line in enumerate(read_text(path, pipes=True).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            one, other, same = row["a"], row["b"], row["same"]
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f'{path}, line {number}: expected {{"a": text, "b": text, "same": true}}.') from error
        if not (isinstance(one, str) and isinstance(other, str) and isinstance(same, bool) and one and other):
            raise RequestError(f"{path}, line {number}: a and b must be texts, and same true or false.")
        found.append(QuestionPair(one, other, same))
    if not any(pair.same for pair in found) or all(pair.same for pair in found):
        raise RequestError(f"{path} needs pairs of the same meaning and pairs of different meanings.")
    return found


def measure(pairs: Sequence[QuestionPair], embed: Embed, rate: float) -> Threshold:
    """The least threshold at which at most `rate` of the pairs with different meanings hit."""
    vectors = embed([text for pair in pairs for text in (pair.one, pair.other)])
    cosines = (vectors[::2] * vectors[1::2]).sum(axis=1)
    allowed = np.array([same_facts(pair.one, pair.other) for pair in pairs])
    same = np.array([pair.same for pair in pairs])
    rivals = np.sort(cosines[~same & allowed])[::-1]
    spared = int(rate * np.count_nonzero(~same))
    # Just above the first rival that may not hit; rounded up to four places.
    bound = float(rivals[spared]) if spared < len(rivals) else 0.0
    threshold = float(np.floor(bound * 1e4) + 1) / 1e4 if spared < len(rivals) else 0.0
    hit = allowed & (cosines >= threshold)
    return Threshold(
        threshold,
        int(same.sum()),
        int((hit & same).sum()),
        int((~same).sum()),
        int((hit & ~same).sum()),
        int((~same & ~allowed).sum()),
    )
