"""How the answers of a chat end, and their statistics."""

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.answer.event import AnswerEvent
from localllm.chats.records import Message
from localllm.engine.request import FinishReason


def note_end(
    message: Message,
    last: AnswerEvent,
    unseen: Sequence[str],
    before: Mapping[str, Any] | None = None,
    pictures: int = 0,
) -> None:
    """Record how an answer ended and its statistics.

    unseen: names of pictures that were not sent. before: the statistics of the part that the answer continues.
    pictures: how many came with the question; of those, what the model saw is recorded.
    """
    counts, timings = last.counts, last.timings
    decoded = counts.generated - 1
    message.finish_reason = last.finish_reason
    message.error = last.error if last.finish_reason is FinishReason.ERROR else None
    stats = {
        "prompt": counts.prompt,
        "cached": counts.cached,
        "recomputed": counts.recomputed,
        "generated": counts.generated,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "drafting_s": timings.drafting_s,
        "ttft_s": timings.ttft_s,
        "prefill_s": timings.prefill_s,
        "decode_s": timings.decode_s,
        "speed": decoded / timings.decode_s if decoded > 0 and timings.decode_s > 0 else 0.0,
        "seed": last.seed,
        "unseen": list(unseen),
        "pictures": [str(view) for view in last.pictures[-pictures:]] if pictures else [],
    }
    message.stats = _joined(before, stats) if before else stats


def _joined(first: Mapping[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The stats of a continued answer from those of its two parts."""
    seconds = [part.get("decode_s") or 0.0 for part in (first, second)]
    decoded = sum((part.get("speed") or 0.0) * took for part, took in zip((first, second), seconds, strict=True))
    return second | {
        "prompt": first.get("prompt", 0),
        "cached": first.get("cached", 0),
        "ttft_s": first.get("ttft_s", 0.0),
        "prefill_s": first.get("prefill_s", 0.0),
        **{
            name: (first.get(name) or 0) + (second.get(name) or 0)
            for name in ("generated", "drafted", "accepted", "drafting_s")
        },
        "decode_s": sum(seconds),
        "speed": decoded / sum(seconds) if sum(seconds) else 0.0,
    }
