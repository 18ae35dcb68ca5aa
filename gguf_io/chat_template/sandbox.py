"""The parent's side of the template worker: starts it, asks it, and turns its end into an error."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf_io.chat_template import limits
from gguf_io.errors import TemplateError, shortened

# -I keeps the environment's PYTHON* settings out; the parent's own search path makes the imports the same.
_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[1:]; from gguf_io.chat_template.worker import main; main()"
MOST_OF_A_REFUSAL = 1000  # characters: a template may raise with all of a conversation
_MAX_REPLY_BYTES = 12 * limits.MAX_OUTPUT_CHARS + 4096  # JSON writes a character beyond U+FFFF as \uXXXX\uXXXX


class TemplateRefusalError(TemplateError):
    """The template ran and raised: it does not take these messages. Other shapes of the same messages may do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rendering: the text, or "" and what the template raised instead."""

    text: str
    refusal: str | None = None


class TemplateSandbox:
    """Runs one template's source in a child process, started when first needed and again after it was ended.

    Thread-safe: requests are answered one at a time, and waiting for one holds no interpreter lock. Every request
    ends within `limits`; the child ends with this object, with the parent, or when it exceeds a limit.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., TemplateSandbox] | None = None  # ends the worker, once

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text for these variables. Raises TemplateRefusalError, or TemplateError beyond a limit."""
        (outcome,) = self.render_each([variables])
        if outcome.refusal is not None:
            raise TemplateRefusalError(outcome.refusal)
        return outcome.text

    def render_each(self, renders: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Several renderings within the limits of one request."""
        messages = sum(len(variables["messages"]) for variables in renders)
        seconds = min(limits.CPU_SECONDS + limits.CPU_SECONDS_PER_MESSAGE * messages, limits.MAX_CPU_SECONDS)
        reply = self._ask({"renders": renders}, seconds)
        return [
            Outcome(outcome["text"]) if "text" in outcome else Outcome("", _located(outcome["error"], outcome["line"]))
            for outcome in reply["outcomes"]
        ]

    def variables(self) -> frozenset[str]:
        """The names that the template reads from outside, some of which it may set in places."""
        return frozenset(self._ask({"variables": True}, limits.CPU_SECONDS)["variables"])

    def _ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        request = {"source": self._source, "seconds": seconds, **question}
        try:
            line = json.dumps(request, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(
                f"messages and tools hold plain JSON values (text, numbers, lists, dictionaries): {error}"
            ) from None
        with self._lock:
            reply = self._exchange(line, seconds)
        if "syntax" in reply:
            raise TemplateError(_located(reply["syntax"], reply["line"]))
        return reply

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        worker = self._running_worker()
        clock = threading.Timer(seconds + limits.WALL_GRACE_SECONDS, worker.kill)
        clock.daemon = True
        clock.start()
        answer = b""
        try:
            answer = _converse(worker, line)
        finally:
            late = clock.finished.is_set()
            clock.cancel()
            if not answer.endswith(b"\n"):  # it died, or an interrupt left half an exchange that must not be read on
                self._stop()
        if not answer.endswith(b"\n"):
            raise TemplateError(f"chat template: {_reason_of_end(worker.returncode, late, seconds)}")
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def _running_worker(self) -> subprocess.Popen[bytes]:
        if self._worker is None or self._worker.poll() is not None:
            self._stop()
            self._worker = _start_worker()
            self._finalizer = weakref.finalize(self, _end_worker, self._worker)
        return self._worker

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()


def _start_worker() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOTSTRAP, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is the parent's
        )
    except OSError as error:
        raise TemplateError(f"cannot start the process that renders chat templates: {error}") from error


def _converse(worker: subprocess.Popen[bytes], line: bytes) -> bytes:
    """One request and its reply; less than a whole line when the worker ended instead."""
    stdin, stdout = worker.stdin, worker.stdout
    if stdin is None or stdout is None:
        raise TypeError("the worker was started without pipes")
    try:
        stdin.write(line)
        stdin.flush()
    except OSError:  # it ended before it had read everything
        return b""
    return stdout.readline(_MAX_REPLY_BYTES)


def _end_worker(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # a reader that is gone cannot take what was still buffered
                pipe.close()


def _reason_of_end(status: int, late: bool, seconds: float) -> str:
    if late:
        return f"it had not answered after {seconds + limits.WALL_GRACE_SECONDS:g} s and was ended"
    if sys.platform != "win32" and status == -signal.SIGPROF:
        return f"it used more than {seconds:g} s of CPU time and was ended"
    if status == limits.EXIT_MEMORY:
        return f"it used more than {limits.MAX_MEMORY_BYTES >> 20} MiB of memory and was ended"
    return f"the process that renders it ended with status {status}"


def _located(message: str, line: int | None) -> str:
    place = "chat template" if line is None else f"chat template, line {line}"
    return f"{place}: {shortened(message, MOST_OF_A_REFUSAL)}"
