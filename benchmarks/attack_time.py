"""Clocks that jump, and a server that is suspended, as when a laptop sleeps. Used by benchmarks/attack.py."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from benchmarks.attack_files import LONG
from benchmarks.attack_stage import PATIENCE_S, Served, SkippedError, Stage, answer_of, check

LIBRARIES = ("/usr/lib/x86_64-linux-gnu/faketime", "/usr/lib/aarch64-linux-gnu/faketime", "/usr/local/lib/faketime")
YEARS = (10, -20, 3, -30)
STOPPED_S = 20.0


def clock_jumps(stage: Stage) -> str:
    """A clock that jumps years ahead and back, while answers are written, models are idle and KV is stored.

    Needs the library of Debian's package faketime. It changes only the wall clock, as setting the time does.
    """
    library = next((path for folder in LIBRARIES if (path := Path(folder) / "libfaketime.so.1").exists()), None)
    if library is None:
        raise SkippedError("needs the package faketime")
    clock = stage.home / "clock"
    clock.write_text("+0")
    faked = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with stage.serve(**faked) as served:
        expected, text = answer_of(served, None, LONG, 24), _streamed(served)
        for jump in YEARS:
            with _while_streaming(served) as stream:
                clock.write_text(f"{jump:+d}y")
            check(stream == [text], f"another answer after {jump} years")
            check(answer_of(served, None, LONG, 24) == expected, f"another answer behind {jump} years")
            (loaded,) = httpx.get(served.url + "/api/ps", timeout=PATIENCE_S).json()["models"]
            check(loaded["name"].startswith(served.model), "the model was unloaded")
            ahead = int(loaded["expires_at"][:4]) - datetime.now(UTC).year
            check(abs(ahead - jump) <= 1, f"the server's clock is {ahead} years ahead, and not {jump}")
        answer_of(served, None, "Then " + LONG, 24)
        time.sleep(1)  # KV is written to disk while the server is idle
    segments = len(stage.kv_files())
    check(segments > 0, "nothing was kept")
    with stage.serve() as served:  # with the right time again, and files from all of these times
        check(answer_of(served, None, LONG, 24) == expected, "another answer afterwards")
        reused = _cached(served)
    check(reused > len(LONG.split()) // 2, f"only {reused} tokens were kept")
    return (
        f"{len(YEARS)} jumps of up to 33 years: the same answers, the model stayed, {reused} cached tokens at the end"
    )


def suspended(stage: Stage) -> str:
    """A server that is stopped in the middle of an answer, for longer than its keep-alive time, and continued."""
    with stage.serve(OLLAMA_KEEP_ALIVE="5s") as served:
        text = _streamed(served)

        def sleep() -> None:
            os.kill(served.process.pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(served.process.pid, signal.SIGCONT)

        with _while_streaming(served) as stream:
            sleep()
        check(stream == [text], "another answer")
        sleep()
        check(_streamed(served) == text, "another answer after the model's time was over")
    return f"stopped for {STOPPED_S:.0f} s in and after an answer: both answers are whole"


def _body(served: Served, length: int) -> dict[str, Any]:
    options = {"num_predict": length, "temperature": 0}
    return {"model": served.model, "prompt": LONG, "raw": True, "options": options}


def _streamed(served: Served, heard: Callable[[], None] = lambda: None) -> str:
    """A long answer, streamed. heard: called at each token."""
    pieces = []
    with httpx.stream("POST", served.url + "/api/generate", json=_body(served, 400), timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            pieces.append(json.loads(line)["response"])
            heard()
    return "".join(pieces)


@contextmanager
def _while_streaming(served: Served) -> Iterator[list[str]]:
    """Run the block once an answer has begun to stream; the list has the whole answer afterwards."""
    begun, found = threading.Event(), list[str]()
    client = threading.Thread(target=lambda: found.append(_streamed(served, begun.set)))
    client.start()
    try:
        check(begun.wait(PATIENCE_S), "no answer began")
        yield found
    finally:
        client.join()


def _cached(served: Served) -> int:
    """Prompt tokens that were not computed again."""
    body = {"model": served.model, "prompt": LONG, "max_tokens": 1}
    answer = httpx.post(served.url + "/v1/completions", json=body, timeout=PATIENCE_S).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


TIME_ATTACKS: tuple[Callable[[Stage], str], ...] = (clock_jumps, suspended)
