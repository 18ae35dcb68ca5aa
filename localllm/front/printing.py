"""Writes an answer to stdout, streamed or as JSON, and its statistics to stderr."""

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import typer

from gguf_io.media import told_fields, told_lines
from localllm.answer.event import Answer, AnswerEvent, AnswerStream, PartKind
from localllm.engine.request import FinishReason
from localllm.front.terminal import ExitCode, StatusLine, answer, fail, note, warn
from localllm.placement.placement import Placement
from localllm.text import human_bytes


@dataclass(slots=True)
class Printed:
    """An answer as text, with reasoning between <think> and </think>, the markers of most models.

    shows_calls: whether the text includes tool calls as the model wrote them.
    """

    text: list[str] = field(default_factory=list)
    answer: Answer = field(default_factory=Answer)
    shows_calls: bool = True
    _thinking: bool = False
    _thought: bool = False  # reasoning has ended, content has not started

    def add(self, event: AnswerEvent) -> str:
        """Add an event; returns its text."""
        text = ""
        for part in event.parts:
            reasons = part.kind is PartKind.REASONING
            if reasons and not self._thinking:
                text += "<think>" if part.text.startswith("\n") else "<think>\n"
                self._thinking = True
            elif not reasons:
                text += self._close(text)
                if self._thought:
                    text += "" if part.text.startswith("\n") else "\n\n"
                    self._thought = False
            if self.shows_calls or part.kind is not PartKind.TOOL_CALLS:
                text += part.text
            else:
                text += part.unfinished
        if event.finish_reason is not None:
            text += self._close(text)
        self.text.append(text)
        self.answer.add(event)
        return text

    def _close(self, text: str) -> str:
        """The closing marker, if reasoning is open. text: the current event's text so far."""
        if not self._thinking:
            return ""
        self._thinking, self._thought = False, True
        before = text or next((piece for piece in reversed(self.text) if piece), "")
        return "</think>" if before.endswith("\n") else "\n</think>"


@contextlib.contextmanager
def interrupt_cancels(stream: AnswerStream) -> Iterator[None]:
    """Make Ctrl-C cancel the answer; a second Ctrl-C raises KeyboardInterrupt. Main thread only."""

    def cancel(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stream.cancel()

    previous = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def read(stream: AnswerStream, status: StatusLine, silent: bool, shows_calls: bool = True) -> Printed:
    """Read an answer to its end; Ctrl-C cancels it. Unless silent, stream its text to stdout, with a final newline.

    status: shows prefill progress. shows_calls: see Printed.
    """
    printed, written = Printed(shows_calls=shows_calls), ""
    with interrupt_cancels(stream):
        for event in stream:
            show_progress(event, status)
            text = printed.add(event)
            if text and not silent:
                answer(text)
                written = text
    if written and not written.endswith("\n"):
        answer("\n")
    return printed


def end_if_failed(last: AnswerEvent, placed: Placement) -> None:
    """Report an answer that failed; raises typer.Exit."""
    if last.finish_reason is FinishReason.ERROR:
        fail(last.error or "the engine stopped without a reason")
        raise typer.Exit(ExitCode.REFUSED if placed.backend == "remote" else ExitCode.FAILED)


def note_cut(last: AnswerEvent, max_tokens: int | None) -> None:
    """Tell the user on stderr if the answer was cut off by a limit other than their own max_tokens."""
    if last.finish_reason is FinishReason.LENGTH and last.counts.generated != max_tokens:
        used = last.counts.prompt + last.counts.generated
        note(f"The answer is cut off: with its prompt it reached {used:,} tokens. Raise --ctx or --max-tokens.")


def note_pictures(last: AnswerEvent) -> None:
    """Tell the user on stderr what the model saw of each picture and heard of each sound, and what was left out."""
    told = told_lines(last.pictures)
    for name, view in told:
        note(f"{name}: {view}")
    for warning in last.warnings:
        if warning not in {f"{name} {view.warning}" for name, view in told}:
            warn(warning)


def show_progress(event: AnswerEvent, status: StatusLine) -> None:
    """Show queueing or prefill progress; clear the line once prefill is done."""
    if event.progress is None:
        status.clear()
    elif event.progress.queue_position:
        status.show(f"waiting, number {event.progress.queue_position} in the queue")
    else:
        status.show(f"reading the prompt: {event.progress.prefilled} of {event.progress.total} tokens")


def write_json(printed: Printed, model: str, placed: Placement, load_s: float) -> None:
    """Write the whole answer as one JSON object."""
    result = {
        "text": "".join(printed.text),
        "token_ids": printed.answer.token_ids,
        **end_fields(printed.answer.last, model, load_s),
        "backend": placed.name,
        "backend_reason": placed.why,
    }
    answer(json.dumps(result, ensure_ascii=False) + "\n")


def end_fields(last: AnswerEvent, model: str, load_s: float) -> dict[str, Any]:
    """What --json tells of every answer: its model, token counts, how it ended, and times in seconds."""
    return {
        "prompt_tokens": last.counts.prompt,
        "cached_tokens": last.counts.cached,
        "recomputed_tokens": last.counts.recomputed,
        "drafted_tokens": last.counts.drafted,
        "accepted_tokens": last.counts.accepted,
        "completion_tokens": last.counts.generated,
        "finish_reason": last.finish_reason,
        **told_fields(last.pictures),
        **({"warnings": last.warnings} if last.warnings else {}),
        "model": model,
        "timings": {"load_s": load_s, **asdict(last.timings)},
    }


def write_stats(last: AnswerEvent, placed: Placement, load_s: float) -> None:
    """Write backend, speed and memory to stderr. Speeds: prefill of uncached tokens, decode after the first token.

    A remote server may send many tokens at once, so its speed is measured over the whole request, by the client.
    """
    import psutil

    counts, timings = last.counts, last.timings
    seed = "" if last.seed is None else f", seed {last.seed}"
    cached = f"{counts.cached} cached"
    if counts.cached_disk:
        cached += f", {counts.cached_disk} of them read from the disk in {timings.restore_s:.3f} s"
    if counts.recomputed:
        cached += f"; {counts.recomputed} stored tokens computed again, which is faster here"
    head = (
        f"{placed}\nprompt {counts.prompt} tokens ({cached}), answer {counts.generated} tokens, "
        f"ended by {last.finish_reason}{seed}\n"
    )
    if placed.backend == "remote":
        took = timings.prefill_s + timings.decode_s
        note(f"{head}TTFT {timings.ttft_s:.3f} s, whole request {took:.3f} s, {_speed(counts.generated, took)}")
        return
    prefill = _speed(counts.prompt - counts.cached, timings.prefill_s)
    decode = _speed(counts.generated - 1, timings.decode_s)
    if counts.drafted:
        drafting = f", drafted in {timings.drafting_s:.2f} s" if timings.drafting_s else ""
        decode += f" ({counts.accepted} of {counts.drafted} drafted tokens accepted{drafting})"
    memory = human_bytes(psutil.Process().memory_info().rss)
    note(f"{head}load {load_s:.2f} s, TTFT {timings.ttft_s:.3f} s, prefill {prefill}, decode {decode}, memory {memory}")


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tok/s" if tokens > 0 and seconds > 0 else "not measured"
