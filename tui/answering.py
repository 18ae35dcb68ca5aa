"""Follows one answer from the request to its end: one consumer that draws at a steady rate, whatever the speed."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from localllm.engine.request import FinishReason
from tui.backend import Answer, AnswerUpdate
from tui.conversation import Conversation
from tui.sessions.database import SessionError
from tui.status import Latency, SpeedMeter, Status

if TYPE_CHECKING:
    from tui.widgets.messages import AnswerView

FLUSH_S = 1 / 25
SAVE_EVERY_S = 1.0


async def follow(
    answer: Answer,
    view: "AnswerView",
    conversation: Conversation,
    status: Status,
    latency: Latency,
    changed: Callable[[], None],
) -> AnswerUpdate:
    """Draw and save an answer until it ends; return the last update. changed is called when the status has."""
    meter, saved = SpeedMeter(), time.monotonic()
    while True:
        update = answer.poll()
        if update is not None:
            status.counts, status.timings, status.progress = update.counts, update.timings, update.progress
            status.speed = meter.observe(update)
            latency.observe(update)
            changed()
            await view.add(update.parts)
            if update.finish_reason is not None:
                return update
        if time.monotonic() - saved > SAVE_EVERY_S:
            # A database that is busy now is tried again; the last save tells.
            with contextlib.suppress(SessionError):
                conversation.save(view.message)
            saved = time.monotonic()
        await asyncio.sleep(FLUSH_S)


def note_end(view: "AnswerView", update: AnswerUpdate, unseen: Sequence[str] = ()) -> None:
    """Write how the answer ended, its figures, and the names of the pictures it went without, into the message."""
    counts, timings = update.counts, update.timings
    decoded = counts.generated - 1
    message = view.message
    message.finish_reason = update.finish_reason
    message.error = update.error if update.finish_reason is FinishReason.ERROR else None
    message.stats = {
        "prompt": counts.prompt,
        "cached": counts.cached,
        "generated": counts.generated,
        "ttft_s": timings.ttft_s,
        "prefill_s": timings.prefill_s,
        "decode_s": timings.decode_s,
        "speed": decoded / timings.decode_s if decoded > 0 and timings.decode_s > 0 else 0.0,
        "seed": update.seed,
        "unseen": list(unseen),
    }
