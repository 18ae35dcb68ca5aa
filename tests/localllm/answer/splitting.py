"""Answers cut into pieces, as they stream, and the parts that a splitter returns."""

import itertools

from localllm.answer.event import AnswerPart
from localllm.answer.splitter import Splitter


def split_at(splitter: Splitter, text: str, cuts: list[int]) -> list[AnswerPart]:
    """The parts of a text that arrives in pieces; neighbours of the same kind are joined."""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    parts = [part for at, end in itertools.pairwise(edges) for part in splitter.push(text[at:end])]
    joined: list[AnswerPart] = []
    for part in [*parts, *splitter.flush()]:
        if joined and part.kind == joined[-1].kind:
            before = joined.pop()
            calls, deltas = before.tool_calls + part.tool_calls, before.deltas + part.deltas
            part = AnswerPart(part.kind, before.text + part.text, calls, deltas, part.unfinished)  # noqa: PLW2901
        joined.append(part)
    return joined
