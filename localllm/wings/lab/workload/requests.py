"""Requests described by their sizes: random shapes, Poisson arrivals, shared prefixes.

Nothing here depends on texts or servers, so that a load test and a simulation can use the same requests. All draws are
determined by a seed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from localllm.errors import RequestError


class Block(NamedTuple):
    """A piece of a prompt. Blocks with the same identity have the same tokens."""

    identity: str
    tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """at: seconds from the beginning. Prompts that begin with the same blocks share that prefix."""

    at: float
    blocks: tuple[Block, ...]
    answer_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all blocks."""
        return sum(block.tokens for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts, drawn uniformly from least to most, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Read "256" or "128:1024". Raises RequestError naming the option."""
        first, colon, last = text.partition(":")
        try:
            least = int(first)
            most = int(last) if colon else least
        except ValueError:
            least, most = 0, 0
        if not 1 <= least <= most:
            raise RequestError(f"{option} is {text!r}; give a number of tokens, or the least and the most as 128:1024.")
        return cls(least, most)

    def draw(self, dice: random.Random) -> int:
        """A random length."""
        return dice.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Requests of random lengths. The first `shared` tokens of each prompt are one of `groups` prefixes."""

    prompt: Lengths
    answer: Lengths
    shared: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        if self.shared >= self.prompt.least:
            raise RequestError(
                f"A shared prefix of {self.shared} tokens leaves nothing of a prompt of {self.prompt.least}. "
                "Make prompts longer or the prefix shorter."
            )

    def requests(self, count: int, seed: str) -> list[WorkloadRequest]:
        """`count` requests that are all due at once."""
        dice = random.Random(seed)
        return [self._request(number, dice) for number in range(count)]

    def _request(self, number: int, dice: random.Random) -> WorkloadRequest:
        own = Block(f"own {number}", self.prompt.draw(dice) - self.shared)
        prefix = [Block(f"shared {dice.randrange(self.groups)}", self.shared)] if self.shared else []
        return WorkloadRequest(0.0, (*prefix, own), self.answer.draw(dice))


def poisson(requests: Sequence[WorkloadRequest], rate: float, seed: str) -> list[WorkloadRequest]:
    """The same requests with Poisson arrivals of `rate` a second on average; the first is due at once."""
    dice, at, placed = random.Random(f"{seed} arrivals"), 0.0, []
    for request in requests:
        placed.append(replace(request, at=at))
        at += dice.expovariate(rate)
    return placed
