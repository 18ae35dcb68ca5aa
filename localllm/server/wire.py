"""Formats shared by several protocols: lines of a stream, progress, log-probabilities, token counts."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gguf_io.media import told_fields
from localllm.answer.event import Answer, AnswerEvent, Logprob
from localllm.engine.request import Counts, Progress
from localllm.server.load_watch import LoadState

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
SSE_COMMENT = b": keep-alive\n\n"  # clients of server-sent events skip comments

# Next line, line separator, paragraph separator; JSON itself escapes all other line ends.
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_LEAST_LOGPROB = -9999.0  # written for minus infinity, which JSON does not have


def ndjson(value: Any) -> bytes:
    """One line of a stream of JSON objects."""
    return dumps(value) + b"\n"


def sse(value: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + dumps(value) + b"\n\n"


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8 on one line.

    Escapes lone surrogates, which UTF-8 cannot encode, and the characters that httpx takes for line ends.
    """
    try:
        text = _JSON.encode(value)
        return (text if text.isascii() else text.translate(_LINE_ENDS)).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class Framed:
    """Makes lines of a stream that differ in one text only: what is around it is encoded once."""

    def __init__(self, line: Callable[[str], bytes]) -> None:
        """line: makes a line of a text, with whatever a client chose before the text."""
        mark = "\0"
        self._before, _, self._after = line(mark).rpartition(dumps(mark))

    def line(self, text: str) -> bytes:
        """The line of a text."""
        return b"".join((self._before, dumps(text), self._after))


def prompt_progress(progress: Progress) -> dict[str, Any]:
    """Progress before the first token: position in the queue, prompt tokens done and in total."""
    return {
        "queue_position": progress.queue_position,
        "completed": progress.prefilled,
        "total": progress.total,
    }


class TimedProgress:
    """Progress of one prompt in llama-server's fields. wanted: whether the request has `return_progress`."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._began: float | None = None
        self._cached = 0

    def fields(self, progress: Mapping[str, Any]) -> dict[str, Any]:
        """The `prompt_progress` field from prompt_progress()'s result; empty for a load or a queued request."""
        if not self._wanted or progress.get("queue_position") != 0:
            return {}
        now, done = time.monotonic(), progress["completed"]
        if self._began is None:
            self._began, self._cached = now, done
        times = {"processed": done, "time_ms": round(1000 * (now - self._began))}
        return {"prompt_progress": {"total": progress["total"], "cache": self._cached, **times}}


def load_progress(state: LoadState) -> dict[str, Any]:
    """Progress of a model's load: its phase and the completed share of the phase, 0 to 1."""
    return {"phase": state.phase, "share": round(state.share, 4)}


def logprob_entries(logprobs: Iterable[Logprob]) -> list[dict[str, Any]]:
    """Tokens with log-probabilities and their likeliest alternatives, in Ollama's and OpenAI's chat format."""
    return [
        {**_token(entry.token, entry.logprob), "top_logprobs": [_token(token, value) for token, value in entry.top]}
        for entry in logprobs
    ]


def timings(event: AnswerEvent) -> dict[str, Any]:
    """llama-server's timings of an answer so far, in ms and tokens per second. prompt_n leaves out cached tokens.

    The first token ends the prompt's time, so the rates of generation are those of the others.
    """
    counts, times = event.counts, event.timings
    steps = max(counts.generated - 1, 0)
    read, read_ms, made_ms = counts.prompt - counts.cached, times.prefill_s * 1000, times.decode_s * 1000
    return {
        "cache_n": counts.cached,
        "prompt_n": read,
        "prompt_ms": read_ms,
        "prompt_per_token_ms": read_ms / max(read, 1),
        "prompt_per_second": 1000 * read / read_ms if read_ms else 0.0,
        "predicted_n": counts.generated,
        "predicted_ms": made_ms,
        "predicted_per_token_ms": made_ms / steps if steps else 0.0,
        "predicted_per_second": 1000 * steps / made_ms if made_ms else 0.0,
        **({"draft_n": counts.drafted, "draft_n_accepted": counts.accepted} if counts.drafted else {}),
        **({"draft_ms": times.drafting_s * 1000} if times.drafting_s else {}),
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can represent."""
    return max(logprob, _LEAST_LOGPROB)


def usage(answers: Sequence[Answer], choices: int = 1) -> dict[str, Any]:
    """OpenAI's token counts of all prompts together. choices: answers to each prompt."""
    counts = [answer.last.counts for answer in answers]
    prompt, generated = sum(one.prompt for one in counts[::choices]), sum(one.generated for one in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(one.cached for one in counts[::choices]),
            **cache_written(*counts[::choices]),
        },
        **dropped_of(counts[0]),
    }


def cache_written(*counts: Counts) -> dict[str, int]:
    """The tokens that requests pinned, as some servers of OpenAI's protocol name them; no field for none."""
    written = sum(one.pinned for one in counts)
    return {"cache_write_tokens": written} if written else {}


def dropped_of(counts: Counts) -> dict[str, int]:
    """What did not fit into the context, our addition to every protocol; no field for nothing."""
    dropped = {"dropped_messages": counts.dropped_messages, "dropped_tokens": counts.dropped_tokens}
    return {name: count for name, count in dropped.items() if count}


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(token)}


def notes_of(last: AnswerEvent) -> dict[str, list[Any]]:
    """The last event's warnings and pictures, our addition to every protocol; no field if there are none."""
    warnings = {"warnings": list(last.warnings)} if last.warnings else {}
    return {**warnings, **told_fields(last.pictures)}
