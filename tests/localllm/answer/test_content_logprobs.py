"""Which log-probabilities of an answer belong to its content."""

from collections.abc import Sequence

import pytest

from localllm.answer.event import Answer, AnswerEvent, AnswerPart, Logprob, PartKind
from localllm.answer.splitting import answer_splitter
from localllm.answer.tool_calls.formats import call_formats

THOUGHTS = [("<think>", "</think>")]
TOOLS = {"look": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'


def content_of(tokens: Sequence[bytes], events: int) -> str:
    """The content's tokens, joined by "|". events: how many the answer comes in."""
    splitter, answer = answer_splitter(THOUGHTS, call_formats(CALL), TOOLS), Answer()
    size = -(-len(tokens) // events)
    pending = b""
    for begin in range(0, len(tokens), size):
        some = tokens[begin : begin + size]
        pending += b"".join(some)
        text = pending.decode("utf-8", "ignore")
        pending = pending[len(text.encode()) :]
        parts = splitter.push(text) + (splitter.flush() if begin + size >= len(tokens) else [])
        answer.add(AnswerEvent(tuple(parts), logprobs=tuple(Logprob(token, -1.0) for token in some)))
    assert len(answer.logprobs) == len(tokens)
    return "|".join(entry.token.decode("utf-8", "backslashreplace") for entry in answer.content_logprobs)


@pytest.mark.parametrize("events", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("tokens", "content"),
    [
        (["It", " is", " so", "."], "It| is| so|."),
        (["<think>", "I", " think", "</think>", "\n\n", "It", " is"], "It| is"),
        (["<th", "ink>", "It is", "</", "think", ">", "It", " is", " it"], "It| is| it"),
        (["<think>", "a", "</think>", "a", "a", "b", "a"], "a|a|b|a"),
        (["<think>", "", "</think>", "so"], "so"),
        (["Let", " me", " look.", "\n", *CALL.partition("look"), "\n", "Done"], "Let| me| look.|\n|Done"),
        (["<think>", "é", "</think>", "na", "ïve"], "na|ïve"),
        (["<think>never closed", " again"], ""),
        (["one", " < two", " <", " 3"], "one| < two| <| 3"),
    ],
)
def test_only_tokens_of_the_content(tokens: list[str], content: str, events: int) -> None:
    assert content_of([token.encode() for token in tokens], min(events, len(tokens))) == content


def test_tokens_of_a_part_of_a_character() -> None:
    first, second = "ï".encode()[:1], "ï".encode()[1:]
    assert content_of([b"<think>", first, second, b"</think>", b"na", first, second, b"ve"], 8) == ("na|\\xc3|\\xaf|ve")


def test_what_the_splitter_adds_has_none() -> None:
    answer = Answer()
    answer.add(AnswerEvent((AnswerPart(PartKind.CONTENT, "\nDone"),), logprobs=(Logprob(b"Done", -1.0),)))
    assert [entry.token for entry in answer.content_logprobs] == [b"Done"]
