"""The texts by which models fence off reasoning, as their templates show them: rows of opening and closing."""

from collections.abc import Sequence

Marker = tuple[str, str]

REASONING: tuple[Marker, ...] = (
    ("<think>", "</think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|begin|>assistant<|think|>", "<|end|>"),
)


def find_markers(text: str, known: Sequence[Marker]) -> tuple[Marker, ...]:
    """The known markers both of whose ends stand in the text, in the table's order: enclosing ones first."""
    return tuple((opening, closing) for opening, closing in known if opening in text and closing in text)
