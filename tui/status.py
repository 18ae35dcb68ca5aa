"""The facts of the status line, and how they are put into the width that there is."""

from dataclasses import dataclass, field
from typing import Any

from textual.content import Content

from localllm.answer.event import AnswerEvent
from localllm.cli.terminal import human_bytes
from localllm.engine.request import Counts, Progress, Timings

# Live speed is that of so many last seconds.
SPEED_WINDOW_S = 2.0


@dataclass(slots=True)
class Status:
    """What is known now. activity is what is being done and, if known, which share of it is done."""

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

    def recall(self, stats: dict[str, Any]) -> None:
        """Show what of the context an answer of the past took, by its stats, or nothing; live figures are over."""
        self.counts = Counts(prompt=stats.get("prompt", 0), generated=stats.get("generated", 0))
        self.timings, self.speed = Timings(), 0.0

    def segments(self) -> list[tuple[int, str, str]]:
        """(rank, text, style) in the order shown. Where the line is too narrow, the highest ranks go first."""
        segments: list[tuple[int, str, str]] = []
        if self.activity:
            what, share = self.activity
            segments.append((0, f"{bar(share)} {share:.0%} {what}", "$accent"))
        elif self.answering and self.progress:
            segments.append((0, self._prefill(), "$accent"))
        elif self.answering:
            segments.append((0, "writing", "$success"))
        elif not self.model and self.context is None:
            segments.append((0, "no model yet: F4 offers some", "$foreground 60%"))
        if self.model:
            segments.append((2, f"{self.model}", "bold"))
            segments.append((4, self.place, "$foreground 60%"))
        used = self.counts.prompt + self.counts.generated
        if self.context:
            share = used / self.context
            style = "$error" if share > 0.95 else "$warning" if share > 0.8 else "$foreground 60%"
            segments.append((1, f"ctx {used}/{self.context} {bar(share)}", style))
        if self.counts.cached_memory or self.counts.cached_disk:
            kept = [f"{self.counts.cached_memory} mem"] if self.counts.cached_memory else []
            kept += [f"{self.counts.cached_disk} disk"] if self.counts.cached_disk else []
            segments.append((5, f"cached {' + '.join(kept)}", "$foreground 60%"))
        if self.counts.dropped_messages or self.counts.dropped_tokens:
            what = f"{self.counts.dropped_messages} messages" if self.counts.dropped_messages else "oldest text"
            segments.append((1, f"{what} left out", "$warning"))
        if self.timings.ttft_s:
            segments.append((6, f"TTFT {human_seconds(self.timings.ttft_s)}", "$foreground 60%"))
        if self.speed:
            segments.append((3, f"{self.speed:.0f} tok/s", "$foreground 60%"))
        if self.memory:
            segments.append((7, human_bytes(self.memory), "$foreground 60%"))
        return segments

    def line(self, width: int) -> Content:
        """As many segments as fit, in order."""
        segments = self.segments()
        while len(segments) > 1 and sum(len(text) + 3 for _, text, _ in segments) > width + 1:
            segments.remove(max(segments, key=lambda segment: segment[0]))
        return Content.from_markup(" [dim]│[/] ").join(Content.styled(text, style) for _, text, style in segments)

    def _prefill(self) -> str:
        progress = self.progress
        assert progress is not None
        if progress.queue_position:
            return f"waiting, place {progress.queue_position}"
        done = progress.prefilled / max(progress.total, 1)
        computed = progress.prefilled - self.counts.cached
        left = ""
        if computed > 0 and self.timings.prefill_s > 0.3:
            seconds = (progress.total - progress.prefilled) * self.timings.prefill_s / computed
            left = f", {seconds:.0f} s left"
        return f"reading {bar(done)} {progress.prefilled}/{progress.total}{left}"


class SpeedMeter:
    """Tokens a second over the last SPEED_WINDOW_S of decoding, from the engine's own times and counts."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []

    def observe(self, event: AnswerEvent) -> float:
        """Take an event into account and return the speed; 0 until there are two points."""
        point = (event.timings.decode_s, event.counts.generated)
        if point[1] > 0:
            self._points.append(point)
        while len(self._points) > 2 and self._points[0][0] < point[0] - SPEED_WINDOW_S:
            self._points.pop(0)
        if len(self._points) < 2:
            return 0.0
        seconds = self._points[-1][0] - self._points[0][0]
        return (self._points[-1][1] - self._points[0][1]) / seconds if seconds > 0 else 0.0


def human_seconds(seconds: float) -> str:
    """1.25 s, 340 ms, 4.2 ms."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.{0 if seconds >= 0.01 else 1}f} ms"


def bar(share: float, width: int = 8) -> str:
    """A line that is thick as far as it is filled, to half a cell."""
    whole, half = divmod(round(min(max(share, 0.0), 1.0) * width * 2), 2)
    return ("━" * whole + "╾" * half).ljust(width, "─")
