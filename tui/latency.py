"""What the inspector shows of answers: times and tokens, taken from the engine's events."""

from collections import deque

from localllm.answer.event import AnswerEvent, Logprob

KEPT = 4096


class Latency:
    """Times to the first token, between tokens, drafts, and the last tokens' alternatives. Seconds and counts."""

    def __init__(self) -> None:
        self.ttft: deque[float] = deque(maxlen=KEPT)
        self.itl: deque[float] = deque(maxlen=KEPT)
        self.choices: deque[Logprob] = deque(maxlen=64)
        self.drafted = 0
        self.accepted = 0
        self._last: AnswerEvent | None = None

    def observe(self, update: AnswerEvent) -> None:
        """Take an update into account. Tokens that came in one update share its time evenly."""
        before, self._last = self._last, None if update.finish_reason else update
        self.choices.extend(update.logprobs)
        if update.finish_reason:
            self.drafted += update.counts.drafted
            self.accepted += update.counts.accepted
        if update.timings.ttft_s and (before is None or not before.timings.ttft_s):
            self.ttft.append(update.timings.ttft_s)
        if before is None or before.counts.generated == 0:
            return
        tokens = update.counts.generated - before.counts.generated
        if tokens > 0:
            self.itl.extend([(update.timings.decode_s - before.timings.decode_s) / tokens] * tokens)
