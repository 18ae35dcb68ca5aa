"""Statistics of answers: the status line, decoding speed, and the latencies that the inspector draws."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from textual.content import Content

from localllm.answer.event import AnswerEvent, Logprob
from localllm.engine.request import Counts, Progress, Timings
from localllm.text import counted, harmless, human_bytes, human_seconds

SPEED_WINDOW_S = 2.0  # live speed is an average over these last seconds
STALL_S = 3.0  # an answer without data for this long is shown as stalled
KEPT = 4096  # latency samples kept for the inspector
MUTED = "$foreground 60%"


@dataclass(slots=True)
class Status:
    """The current state. activity: a description and its completed fraction.

    silent_s: seconds since the running answer last produced data.
    """

    model: str = ""
    place: str = ""
    context: int | None = None
    counts: Counts = field(default_factory=Counts)
    timings: Timings = field(default_factory=Timings)
    progress: Progress | None = None
    memory: int | None = None
    activity: tuple[str, float] | None = None
    answering: bool = False
    speed: float = 0.0
    silent_s: float = 0.0
    unsaved: bool = False
    tool: str = ""  # the running tool call

    def recall(self, stats: dict[str, Any]) -> None:
        """Show the context used by a past answer, from its stats, and clear the live figures."""
        self.counts = Counts(prompt=stats.get("prompt") or 0, generated=stats.get("generated") or 0)
        self.timings, self.speed = Timings(), 0.0

    def segments(self) -> list[tuple[int, str, str]]:
        """(rank, text, style) in display order. If the line is too narrow, the highest ranks are dropped first."""
        segments: list[tuple[int, str, str]] = []
        if self.activity:
            what, share = self.activity
            segments.append((0, f"{bar(share)} {share:.0%} {what}", "$accent"))
        elif self.tool:
            segments.append((0, f"⚙ {self.tool}", "$accent"))
        elif self.answering and self.progress:
            segments.append((0, self._prefill(self.progress), "$accent"))
        elif self.answering and self.silent_s >= STALL_S:
            what = "no data" if self.counts.generated else "no token yet"
            segments.append((0, f"{what} for {self.silent_s:.0f} s, Esc stops", "$warning"))
        elif self.answering:
            segments.append((0, "writing" if self.counts.generated else "waiting", "$success"))
        elif not self.model and self.context is None:
            segments.append((0, "no model yet: F4 offers some", MUTED))
        if self.unsaved:
            segments.append((0, "not saved", "$error"))
        if self.model:
            segments.append((2, self.model, "bold"))
            segments.append((4, self.place, MUTED))
        used = self.counts.prompt + self.counts.generated
        if self.context:
            share = used / self.context
            style = "$error" if share > 0.95 else "$warning" if share > 0.8 else MUTED
            segments.append((1, f"ctx {used}/{self.context} {bar(share)}", style))
        if self.counts.recomputed:
            segments.append((6, f"{self.counts.recomputed} computed faster than read", MUTED))
        if self.counts.cached_memory or self.counts.cached_disk:
            kept = [f"{self.counts.cached_memory} in memory"] if self.counts.cached_memory else []
            kept += [f"{self.counts.cached_disk} on disk"] if self.counts.cached_disk else []
            segments.append((5, f"cached {', '.join(kept)}", MUTED))
        if self.counts.dropped_messages or self.counts.dropped_tokens:
            count = self.counts.dropped_messages
            what = counted(count, "message") if count else "oldest text"
            segments.append((1, f"{what} left out", "$warning"))
        if self.timings.ttft_s:
            segments.append((6, f"TTFT {human_seconds(self.timings.ttft_s)}", MUTED))
        if self.speed and self.silent_s < STALL_S:
            segments.append((3, f"{self.speed:.0f} tok/s", MUTED))
        if self.memory:
            segments.append((7, human_bytes(self.memory), MUTED))
        return [(rank, harmless(text), style) for rank, text, style in segments]

    def line(self, width: int) -> Content:
        """As many segments as fit, in order."""
        segments = self.segments()
        while len(segments) > 1 and sum(len(text) + 3 for _, text, _ in segments) > width + 1:
            segments.remove(max(segments, key=lambda segment: segment[0]))
        return Content.from_markup(" [dim]│[/] ").join(Content.styled(text, style) for _, text, style in segments)

    def _prefill(self, progress: Progress) -> str:
        if progress.queue_position:
            return f"queued, place {progress.queue_position}"
        done = progress.prefilled / max(progress.total, 1)
        computed = progress.prefilled - self.counts.cached
        left = ""
        if computed > 0 and self.timings.prefill_s > 0.3:
            seconds = (progress.total - progress.prefilled) * self.timings.prefill_s / computed
            left = f", {seconds:.0f} s left"
        return f"reading {bar(done)} {progress.prefilled}/{progress.total}{left}"


class SpeedMeter:
    """Tokens per second over the last SPEED_WINDOW_S of decoding, from the engine's own times and counts."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []

    def observe(self, event: AnswerEvent) -> float:
        """Record an event and return the speed; 0 until there are two points."""
        point = (event.timings.decode_s, event.counts.generated)
        if point[1] > 0:
            self._points.append(point)
        while len(self._points) > 2 and self._points[0][0] < point[0] - SPEED_WINDOW_S:
            self._points.pop(0)
        if len(self._points) < 2:
            return 0.0
        seconds = self._points[-1][0] - self._points[0][0]
        return (self._points[-1][1] - self._points[0][1]) / seconds if seconds > 0 else 0.0


def bar(share: float, width: int = 8) -> str:
    """A progress bar with a resolution of half a cell."""
    whole, half = divmod(round(min(max(share, 0.0), 1.0) * width * 2), 2)
    return ("━" * whole + "╾" * half).ljust(width, "─")


class Latency:
    """Times to first token and between tokens in seconds, draft counts, and the last tokens' alternatives."""

    def __init__(self) -> None:
        self.ttft: deque[float] = deque(maxlen=KEPT)
        self.itl: deque[float] = deque(maxlen=KEPT)
        self.choices: deque[Logprob] = deque(maxlen=64)
        self.drafted = 0
        self.accepted = 0
        self._last: AnswerEvent | None = None

    def observe(self, update: AnswerEvent) -> None:
        """Record an update. Tokens of one update share its time evenly."""
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
