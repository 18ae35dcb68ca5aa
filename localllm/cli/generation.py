"""One generation as a command shows it: streamed, as JSON, with figures."""

import contextlib
import json
import signal
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Protocol

from localllm.cli.terminal import StatusLine, answer, note
from localllm.engine.backends import BackendChoice
from localllm.engine.request import TokenEvent
from localllm.engine.stream import Completion
from localllm.text import human_bytes


class Stream(Protocol):
    """A generation under way: events, the last of which has a finish_reason."""

    def __iter__(self) -> Iterator[TokenEvent]: ...

    def cancel(self) -> None:
        """Ask to stop. The last event still comes."""


@dataclass(frozen=True, slots=True)
class Started:
    """A generation under way, who computes it, and how long that took to get ready."""

    stream: Stream
    backend: BackendChoice
    load_s: float


@contextlib.contextmanager
def interrupt_cancels(stream: Stream) -> Iterator[None]:
    """Let Ctrl-C end the generation in good order; a second one raises KeyboardInterrupt. Main thread only."""

    def cancel(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stream.cancel()

    previous = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def written(events: Iterable[TokenEvent]) -> Iterator[TokenEvent]:
    """Pass the events on, and their text to stdout as it comes, ended by a newline."""
    text = ""
    for event in events:
        if event.text:
            text = event.text
            answer(text)
        yield event
    if text and not text.endswith("\n"):
        answer("\n")


def with_progress(events: Iterable[TokenEvent], status: StatusLine) -> Iterator[TokenEvent]:
    """Pass the events on, and show how far the prompt has come until the first token is there."""
    for event in events:
        if event.progress is None:
            status.clear()
        elif event.progress.queue_position:
            status.show(f"waiting, place {event.progress.queue_position}")
        else:
            status.show(f"reading the prompt: {event.progress.prefilled} of {event.progress.total} tokens")
        yield event


def write_json(completion: Completion, model: str, backend: BackendChoice, load_s: float) -> None:
    """Write the whole answer as one JSON object."""
    last = completion.last
    result = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": last.counts.prompt,
        "cached_tokens": last.counts.cached,
        "completion_tokens": last.counts.generated,
        "finish_reason": last.finish_reason,
        "model": model,
        "backend": backend.name,
        "backend_reason": backend.why,
        "timings": {"load_s": load_s, **asdict(last.timings)},
    }
    answer(json.dumps(result, ensure_ascii=False) + "\n")


def write_stats(last: TokenEvent, backend: BackendChoice, load_s: float) -> None:
    """Write backend, speed and memory to stderr. Prefill counts the tokens computed, decode those after the first."""
    import psutil

    counts, timings = last.counts, last.timings
    prefill = _speed(counts.prompt - counts.cached, timings.prefill_s)
    decode = _speed(counts.generated - 1, timings.decode_s)
    memory = "" if backend.backend == "remote" else f", memory {human_bytes(psutil.Process().memory_info().rss)}"
    note(
        f"{backend}\nprompt {counts.prompt} tokens ({counts.cached} cached), answer {counts.generated} tokens, "
        f"ended by {last.finish_reason}, seed {last.seed}\n"
        f"load {load_s:.2f} s, TTFT {timings.ttft_s:.3f} s, prefill {prefill}, decode {decode}{memory}"
    )


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tok/s" if tokens > 0 and seconds > 0 else "not measured"
