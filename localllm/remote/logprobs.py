"""Probabilities of tokens as servers tell them: by the tokens' text, since the protocol knows no token ids.

Two shapes: that of chats, and the older one of completions
(https://platform.openai.com/docs/api-reference/chat/object, .../completions/object).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SpeltLogprob:
    """A token's bytes, the natural logarithm of its probability, and its best rivals."""

    spelling: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


def read_logprobs(choice: Mapping[str, Any]) -> tuple[SpeltLogprob, ...]:
    """What a choice of an answer tells, in either shape; () where it tells nothing."""
    told = choice.get("logprobs")
    if not isinstance(told, Mapping):
        return ()
    if isinstance(told.get("content"), list):
        return tuple(_of_chat(entry) for entry in told["content"])
    return tuple(_of_completion(told))


def _of_chat(entry: Mapping[str, Any]) -> SpeltLogprob:
    rivals = tuple((_spelling(rival), float(rival["logprob"])) for rival in entry.get("top_logprobs") or ())
    return SpeltLogprob(_spelling(entry), float(entry["logprob"]), rivals)


def _of_completion(told: Mapping[str, Any]) -> Iterator[SpeltLogprob]:
    tokens, values = told.get("tokens") or (), told.get("token_logprobs") or ()
    tops: Sequence[Mapping[str, Any]] = told.get("top_logprobs") or ({},) * len(tokens)
    for token, value, top in zip(tokens, values, tops, strict=False):
        if value is not None:  # as that of a prompt's first token
            rivals = tuple((str(text).encode(), float(rival)) for text, rival in (top or {}).items())
            yield SpeltLogprob(str(token).encode(), float(value), rivals)


def _spelling(entry: Mapping[str, Any]) -> bytes:
    """The bytes, which also tell a token that is no whole UTF-8; some servers leave them out."""
    data = entry.get("bytes")
    return bytes(data) if data is not None else str(entry["token"]).encode()
