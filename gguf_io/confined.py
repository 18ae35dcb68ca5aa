"""A child process without privileges, for work on untrusted files: chat templates, PDF and DOCX.

No check of such a file bounds the work it causes, so the operating system does: it limits the child's CPU time per
request and its memory, and lets it write no file and start no process. Exceeding the time ends it by a signal,
exceeding the memory by an exit status. macOS cannot bound the memory, and Windows cannot forbid writing files.

The child writes an empty line once it is confined. A request on its stdin is a JSON line {"kind": text, "bytes": N,
"seconds": of CPU time} and N bytes, a reply on its stdout a JSON line, and then as many bytes as its number "raw" says,
if it has one. The child imports this file, so it loads neither NumPy nor Jinja.
"""

import contextlib
import contextvars
import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from gguf_io.interruption import POLL_S, checkpoint, held
from gguf_io.system import ABORTED, OUT_OF_TIME, OVERFLOWED, OWN_SESSION, confine_this_process, limit_processor_time

Reply = dict[str, Any]
T = TypeVar("T")
_Exchanges = queue.SimpleQueue[Callable[[], None] | None]  # each watches an exchange until it ends; None: no more

START_SECONDS = 60.0  # for the child to start, before the time of its first request counts: others may be busy
_EXIT_MEMORY = 77  # the child's exit status when memory ran out
# -I ignores PYTHON* environment variables; passing the parent's search path makes the imports the same.
_BOOTSTRAP = (
    "import importlib, sys; name = sys.argv[1]; sys.path[:] = sys.argv[2:]; importlib.import_module(name).main()"
)


class ChildEndedError(Exception):
    """The child ended without an answer. The message says why, as in "it takes too long: ..."."""


class ChildNotStartedError(ChildEndedError):
    """The child did not start, whatever the request."""


class ConfinedChild:
    """Sends requests to a worker in a child process, which starts on the first request and again after it ended.

    worker: the module whose `main` calls `answer_requests`. memory_bytes: the bound that it sets, for error messages.
    most_reply_bytes: a longer reply ends the child; -1 sets no bound. Thread-safe: requests are answered one at a time,
    and waiting releases the interpreter lock. The child ends with this object, with the parent, beyond a limit, or when
    the request that it works on is cancelled (gguf_io.interruption).
    """

    def __init__(self, worker: str, memory_bytes: int, most_reply_bytes: int = -1) -> None:
        self._worker = worker
        self._memory_bytes = memory_bytes
        self._most_reply_bytes = most_reply_bytes
        self._lock = threading.Semaphore()
        self._finalizer: weakref.finalize[..., ConfinedChild] | None = None  # ends the process, once
        self.process: subprocess.Popen[bytes] | None = None
        self._exchanges: _Exchanges = queue.SimpleQueue()  # of the process, for the thread that watches it

    def ask(self, kind: str, data: bytes, cpu_seconds: float, wall_seconds: float) -> Reply:
        """The worker's reply. Raises ChildEndedError if the child ended or hit a limit, OSError if it cannot start."""
        header = json.dumps({"kind": kind, "bytes": len(data), "seconds": cpu_seconds}).encode() + b"\n"
        with held(self._lock):
            process = self._running()
            reply, waited = self._exchanged(
                process, wall_seconds, lambda: _converse(process, header, data, self._most_reply_bytes)
            )
        if reply is None:
            raise ChildEndedError(self._reason_of_end(process.returncode, cpu_seconds, waited))
        return reply

    def close(self) -> None:
        """End the process. Idempotent; the next request starts another."""
        if self._finalizer is not None:
            self._finalizer()

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.process = subprocess.Popen[bytes](
                [sys.executable, "-I", "-c", _BOOTSTRAP, self._worker, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # libraries' warnings about untrusted files
                **OWN_SESSION,
            )
            self._exchanges = queue.SimpleQueue()
            threading.Thread(target=_watch_all, args=(self._exchanges,), daemon=True).start()
            self._finalizer = weakref.finalize(self, _end, self.process, self._exchanges)
            self._await_start(self.process)
        return self.process

    def _await_start(self, process: subprocess.Popen[bytes]) -> None:
        """Read the child's first line. Raises ChildNotStartedError, and what cancels the work of this context."""
        stdout = process.stdout
        assert stdout is not None
        line, waited = self._exchanged(process, START_SECONDS, lambda: stdout.readline() or None)
        if line is None:
            late = f"had not started after {waited:g} s and was stopped"
            end = late if waited else f"ended with status {process.returncode} when it started"
            raise ChildNotStartedError(f"the process that works on it {end}")

    def _exchanged(
        self, process: subprocess.Popen[bytes], seconds: float, exchange: Callable[[], T | None]
    ) -> tuple[T | None, float]:
        """What an exchange with the child returns, and `seconds` if they have passed, else 0.

        The child is killed if they pass before the exchange has ended, and closed if that returns None or raises.
        Raises what cancels the work of this context.
        """
        ended, ending = threading.Event(), threading.Lock()
        until = time.monotonic() + seconds
        self._exchanges.put(partial(contextvars.copy_context().run, _watch, process, until, ended, ending))
        found: T | None = None
        try:
            found = exchange()
        finally:
            with ending:
                ended.set()
            if found is None:  # it ended, or an interrupt left half an exchange
                self.close()
        checkpoint()
        return found, seconds if time.monotonic() > until else 0.0

    def _reason_of_end(self, status: int, cpu_seconds: float, waited: float) -> str:
        if waited:
            return f"it takes too long: it had not answered after {waited:g} s and was stopped"
        if status == OUT_OF_TIME:
            return f"it takes too long: it used more than {cpu_seconds:g} s of CPU time and was stopped"
        if status == _EXIT_MEMORY or status in ABORTED:  # Rust and C++ abort
            return f"it takes too much memory: it used more than {self._memory_bytes >> 20} MiB of memory"
        if status in OVERFLOWED:
            return "it is nested too deeply"
        return f"the process that works on it ended with status {status}"


class ConfinedChildren:
    """Several children of one worker, each started when all others are busy. Thread-safe; see ConfinedChild."""

    def __init__(self, worker: str, memory_bytes: int, most: int) -> None:
        """most: requests that are answered at the same time."""
        self._free = [ConfinedChild(worker, memory_bytes) for _ in range(most)]
        self._slots = threading.Semaphore(most)

    def ask(self, kind: str, data: bytes, cpu_seconds: float, wall_seconds: float) -> Reply:
        """As ConfinedChild's, from a child that is free; waits for one."""
        with held(self._slots):
            child = self._free.pop()  # the last one used, which is running
            try:
                return child.ask(kind, data, cpu_seconds, wall_seconds)
            finally:
                self._free.append(child)


def _watch_all(exchanges: _Exchanges) -> None:
    """Watch a process's exchanges, one after the other."""
    for watch in iter(exchanges.get, None):
        watch()


def _watch(process: "subprocess.Popen[bytes]", until: float, ended: threading.Event, ending: threading.Lock) -> None:
    """Kill a process unless `ended` is set first: at a time, or when the work of this context is cancelled.

    ending: held while `ended` is set. From then on, the process may work on another request.
    """
    while not ended.is_set():
        time.sleep(min(POLL_S, max(until - time.monotonic(), 0.0)))  # the end of an exchange wakes nobody
        try:
            checkpoint()
            late = time.monotonic() > until
        except Exception:  # raised again by the thread that waits for the answer
            late = True
        if late:
            with ending:
                if not ended.is_set():
                    process.kill()
            return


def answer_requests(answer: Callable[[str, bytes], Reply], memory_bytes: int) -> None:
    """The worker's side: drop privileges, then reply to requests (kind, data) until stdin closes."""
    confine_this_process(memory_bytes)
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    while header := sys.stdin.buffer.readline():
        try:
            request = json.loads(header)
            data = sys.stdin.buffer.read(request["bytes"])
            limit_processor_time(request["seconds"])
            found = answer(request["kind"], data)
            raw = found.pop("raw", b"")
            reply = json.dumps(found | {"raw": len(raw)} if raw else found).encode()
        except MemoryError:
            os._exit(_EXIT_MEMORY)
        limit_processor_time(0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.write(raw)
        sys.stdout.buffer.flush()


def _converse(process: subprocess.Popen[bytes], header: bytes, data: bytes, most_reply_bytes: int) -> Reply | None:
    """Send one request and read its reply, with the bytes after it as "raw"; None if the child ended instead."""
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise TypeError("the worker was started without pipes")
    try:
        stdin.write(header)
        stdin.write(data)
        stdin.flush()
    except OSError:  # it ended before it had read everything
        return None
    line = stdout.readline(most_reply_bytes)
    if not line.endswith(b"\n"):
        return None
    reply: Reply = json.loads(line)
    if "raw" in reply:
        size, reply["raw"] = reply["raw"], stdout.read(reply["raw"])
        return reply if len(reply["raw"]) == size else None
    return reply


def _end(process: subprocess.Popen[bytes], exchanges: _Exchanges) -> None:
    exchanges.put(None)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # the child cannot read what was still buffered
                pipe.close()
