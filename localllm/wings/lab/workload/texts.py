"""Prompts as text: read from files, or made up with a given number of tokens."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import RequestError
from localllm.files import read_text
from localllm.wings.lab.workload.requests import WorkloadRequest

Prompt = str | list[dict[str, Any]]
"""A text, or a conversation's messages in OpenAI's format."""

# Short and frequent, so that most vocabularies have a token for each.
_TEXT = (
    "the of and to in is was he for it with as his on be at by had not are but from or have an they which one you were "
    "all her she there would their we him been has when who will no more if out so up said what its about than into "
    "them can only other time new some could these two may first then do any like my now over such our man me even "
    "most made after also did many off before must well back through years much where your way down should because "
    "long each just state people those too mr how little good world make very year still see work life great"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class TokenRatio:
    """A server's tokens per made-up word. overhead: tokens that its chat template adds to a prompt."""

    tokens_per_word: float
    overhead: float

    @classmethod
    def between(cls, short: tuple[int, int], long: tuple[int, int]) -> "TokenRatio":
        """From (words, tokens) of two prompts. Raises ValueError if the longer one does not have more tokens."""
        (words, tokens), (more_words, more_tokens) = short, long
        if more_tokens <= tokens:
            raise ValueError(f"{more_words} words are {more_tokens} tokens, and {words} words are {tokens}")
        slope = (more_tokens - tokens) / (more_words - words)
        return cls(slope, max(0.0, tokens - slope * words))


def words(count: int, seed: str) -> str:
    """`count` random words; the same seed gives the same text."""
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


def text_of(request: WorkloadRequest, ratio: TokenRatio, seed: str) -> str:
    """A prompt of about the request's number of tokens, including the template's.

    With the same seed, equal blocks become equal text, so that requests share prefixes as their blocks do.
    """
    texts = []
    for number, block in enumerate(request.blocks, 1):
        tokens = block.tokens - (ratio.overhead if number == len(request.blocks) else 0)
        texts.append(words(max(1, round(tokens / ratio.tokens_per_word)), f"{seed} {block.identity}"))
    return " ".join(texts)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, one a line; in .jsonl, objects with prompt, messages, or turns (the first one is used).

    Raises RequestError naming file and line.
    """
    lines = read_text(path, pipes=True).split("\n")  # splitlines would also split at U+2028
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise RequestError(f"{path} has no prompts.")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_from_json(line, f"{path}, line {number}") for number, line in numbered]


def _from_json(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where}: not JSON ({error}).") from error
    match row:
        case {"prompt": str(prompt)}:
            return prompt
        case {"messages": [_, *_] as messages} if all(isinstance(message, dict) for message in messages):
            return list(messages)
        case {"turns": [str(turn), *_]}:
            return turn
    raise RequestError(f'{where}: give an object with "prompt", "messages" or "turns".')
