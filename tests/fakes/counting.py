"""Counts a server's tokens: those of all prompts, those that it computed, and those that were new."""

import re
from dataclasses import dataclass

import httpx

# What the server's program runs first. New tokens of a request are those after the longest beginning that it shares
# with an earlier prompt and answer.
COUNTING = """
import os
from localllm.engine import engine
made, make = [], engine.sequence_of
def counting(*given):
    sequence = make(*given)
    shared = [len(os.path.commonprefix([sequence.tokens, known.tokens])) for known in made]
    print("new", max(len(sequence.tokens) - max(shared, default=0), 1), flush=True)
    made.append(sequence)
    return sequence
engine.sequence_of = counting
"""


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens of all prompts so far, how many of them were computed, and how many were new."""

    prompts: int
    computed: int
    new: int

    def since(self, before: "Counted") -> "Counted":
        """What came after an earlier count."""
        return Counted(self.prompts - before.prompts, self.computed - before.computed, self.new - before.new)


def counted(url: str, output: str) -> Counted:
    """The counts of a server that began with COUNTING. output: what it has printed so far."""
    metrics = httpx.get(f"{url}/metrics").text
    prompts, hits = (
        sum(map(float, re.findall(rf"^localllm_{kind}\{{.*\}} (\S+)$", metrics, re.MULTILINE)))
        for kind in ("prompt_tokens_total", "prefix_hit_tokens_total")
    )
    new = sum(map(int, re.findall(r"^new (\d+)$", output, re.MULTILINE)))
    return Counted(int(prompts), int(prompts - hits), new)
