"""What the terminal chat costs: first paint, typing echo while an answer streams, processor time, memory, leaving.

Run it on an idle machine: `python -m benchmarks.tui [MODEL]`. The answers are scripted, so that only the screen is
measured; only the cost of a restart of a long chat is measured with a model, the built-in one by default.
"""

import asyncio
import contextlib
import gc
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from cpu_kernels.kernel_cache import CACHE_VARIABLE, cache_root
from gguf_io.runner_info import LoadProgress
from localllm.answer.event import AnswerEvent, AnswerPart, PartKind
from localllm.answer.request import AnswerRequest
from localllm.chats import Message, Role, SessionStore
from localllm.engine.request import Counts, FinishReason, Progress, Timings
from localllm.library.modelfile import Modelfile
from localllm.library.names import BUILT_IN
from localllm.settings import Settings
from tui.app import ChatApp
from tui.backend import LoadedInfo, PickerRow
from tui.engine_backend import EngineBackend
from tui.screens.chat import ChatScreen
from tui.widgets.transcript import WINDOW

SPEED = 400  # tokens per second
SECONDS = 8
LONG = 10_000  # messages
PROMPT = b"sk anything"  # the cursor is on the A
CHAT = "from tui.main import main; main()"
LEAST = """
from textual.app import App
from textual.widgets import Static
class Least(App):
    def compose(self):
        yield Static("Ask anything")
Least().run()
"""
TEXT = "Some **words** of an answer, `code` among them, go on and on.\n\n"
USUAL_SPEED = 40  # tokens per second of the answers in a grown chat
GROWN = 200  # messages that a chat grows by
RICH = """## Step by step

Use a **virtual environment** so that `pip` leaves the system alone, and pin what you install. It takes a minute:

1. Create it with `python -m venv .venv`, then activate it.
2. Install the requirements:
   - `numpy` for arrays,
   - `pandas` for tables, which is *large*.
3. Run the tests before you change anything.

| tool | what it does | when |
|------|--------------|------|
| venv | isolates packages | always |
| pip | installs them | after a change |
| pytest | runs the tests | often |

```python
def mean(values: list[float]) -> float:
    # The mean; 0.0 if there are none.
    if not values:
        return 0.0
    return sum(values) / len(values)


for name in ("one", "two"):
    print(name, mean([1.0, 2.0, 3.0]))
```

> A word of warning: do not delete the folder while a program of it runs.

- First, check the versions.
- Then, compare with the *lock file*; see [the docs](https://example.com/docs).
- At last, run `make test` again and look at the output closely.

That is all there is to it. If something fails, read the last lines of the output first: they name the file and the \
line that went wrong, and most of the time the reason, too. Ask again with that text.
"""


class TimedAnswer:
    """Returns the 4-character tokens of a text that are due by the clock, however often the screen polls.

    speed: tokens per second; 0 returns all at once.
    """

    def __init__(self, text: str, speed: int) -> None:
        self._text, self._speed = text, speed
        self._began = time.monotonic()
        self._sent, self._count = 0, -(-len(text) // 4)
        self.ends = self._began + self._count / (speed or self._count)

    def poll(self) -> list[AnswerEvent]:
        passed = time.monotonic() - self._began
        due = min(int(passed * self._speed), self._count) if self._speed else self._count
        if due == self._sent:
            return []
        start, self._sent = self._sent, due
        text = self._text[4 * start : 4 * due]
        reason = FinishReason.STOP if due == self._count else None
        counts, timings = Counts(prompt=9, generated=due), Timings(decode_s=passed, ttft_s=0.01)
        progress: Progress | None = None
        return [AnswerEvent((AnswerPart(PartKind.CONTENT, text),), counts, timings, progress, finish_reason=reason)]

    def cancel(self) -> None:
        """Do nothing: it ends by itself."""


class TimedBackend:
    """A backend whose answers are timed; everything else is empty."""

    def __init__(self, text: str = (TEXT * SPEED)[: 4 * SPEED * SECONDS], speed: int = SPEED) -> None:
        self.answers: list[TimedAnswer] = []
        self.text, self.speed = text, speed
        self.info: LoadedInfo | None = None

    def load(self, name: str, progress: LoadProgress, pull: bool = True) -> LoadedInfo:
        self.info = LoadedInfo(name, "benchmark", 8192, converses=False)
        return self.info

    def submit(self, request: AnswerRequest) -> TimedAnswer:
        self.answers.append(TimedAnswer(self.text, self.speed))
        return self.answers[-1]

    def count_tokens(self, text: str) -> int | None:
        return None

    def see_picture(self, data: bytes, least: int | None = None, most: int | None = None) -> None:
        return None

    def expected_counts(self, request: AnswerRequest) -> Counts | None:
        return None

    def models(self, near: str | None) -> Sequence[PickerRow]:
        return ()

    def save(self, name: str, recipe: Modelfile) -> None:
        """Store nothing."""

    def inspect(self) -> None:
        return None

    def memory_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        """Free nothing."""


def first_paint(runs: int = 7) -> tuple[float, float]:
    """Seconds from the program's start, in a home without a model, until the prompt is on the terminal.

    And the same for a minimal Textual application that shows two words; medians of alternating runs. Both run on a
    pseudo terminal.
    """
    chats, least = zip(*((_time_to_prompt(CHAT), _time_to_prompt(LEAST)) for _ in range(runs)), strict=True)
    return statistics.median(chats), statistics.median(least)


def _time_to_prompt(script: str) -> float:
    with tempfile.TemporaryDirectory() as home:
        terminal, other_end = pty.openpty()
        termios.tcsetwinsize(other_end, (40, 120))
        environment = os.environ | {"HOME": home, "TERM": "xterm-256color"}
        for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
            environment.pop(variable, None)
        program = [sys.executable, "-c", script]
        began, seen = time.perf_counter(), b""
        with subprocess.Popen(
            program, stdin=other_end, stdout=other_end, stderr=other_end, env=environment, start_new_session=True
        ) as process:
            os.close(other_end)
            while PROMPT not in seen:
                seen += os.read(terminal, 1 << 16)
            took = time.perf_counter() - began
            os.close(terminal)
            process.terminate()  # the process that watches the chat forwards the signal
    return took


def resumed(folder: Path, name: str) -> tuple[float, float, int]:
    """Seconds to the first token of a long chat after a restart, with its KV on disk and without; tokens restored."""
    os.environ.setdefault(CACHE_VARIABLE, str(cache_root()))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    asked = [{"role": "user", "content": TEXT * 28}]
    answer, _ = _ask(name, asked, disk=True)
    asked += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
    _, kept = _ask(name, asked, disk=True)
    _, again = _ask(name, asked, disk=False)
    return kept.timings.ttft_s, again.timings.ttft_s, kept.counts.cached_disk


def _ask(name: str, messages: list[dict[str, str]], disk: bool) -> tuple[str, AnswerEvent]:
    """A model's answer and its last event; the model is loaded before and freed afterwards."""
    backend = EngineBackend(lambda _: Settings(disk_cache=disk, kv_mib=256))
    backend.load(name, lambda what, share: None)
    try:
        request = AnswerRequest(messages=messages, continues_text=True, sampling={"temperature": 0}, max_tokens=8)
        events = list(backend.submit(request))
        return "".join(event.content for event in events), events[-1]
    finally:
        backend.close()


async def streaming(folder: Path) -> tuple[list[float], list[float], float]:
    """Typing echo and event-loop lag in seconds while an answer streams, and how late the answer ends."""
    store = SessionStore(folder / "streaming.db")
    backend = TimedBackend()
    app = ChatApp(backend, store, "timed")
    echo: list[float] = []
    lag: list[float] = []
    async with app.run_test(size=(120, 40)) as pilot:
        chat = app.screen
        assert isinstance(chat, ChatScreen)
        while chat.info is None:
            await pilot.pause(0.01)
        chat.prompt.insert("go")
        await pilot.press("enter")
        while not chat.busy:
            await asyncio.sleep(0.001)
        while chat.busy:
            pressed = time.monotonic()
            length = len(chat.prompt.text)
            app.simulate_key("x")
            while len(chat.prompt.text) == length and chat.busy:
                await asyncio.sleep(0)
            echo.append(time.monotonic() - pressed)
            slept = time.monotonic()
            await asyncio.sleep(0.05)
            lag.append(time.monotonic() - slept - 0.05)
        late = time.monotonic() - backend.answers[0].ends
    store.close()
    return echo, lag, late


async def long_chat(folder: Path) -> tuple[float, float]:
    """Seconds to open a chat of LONG messages, and MiB that it adds to the process."""
    store = SessionStore(folder / "long.db")
    session, parent = store.create("m", {}), None
    for number in range(LONG):
        role = Role.USER if number % 2 == 0 else Role.ASSISTANT
        reason = None if role is Role.USER else "stop"
        parent = store.add(Message(0, session, parent, role, TEXT * 4, finish_reason=reason)).id
    app = ChatApp(TimedBackend(), store, "timed")
    async with app.run_test(size=(120, 40)) as pilot:
        chat = app.screen
        assert isinstance(chat, ChatScreen)
        before, began = psutil.Process().memory_info().rss, time.monotonic()
        chat.conversation.open(session)
        await chat.show_conversation()
        await pilot.pause()
        took = time.monotonic() - began
        memory = (psutil.Process().memory_info().rss - before) / 2**20
    store.close()
    return took, memory


async def grown(folder: Path) -> tuple[float, float, float, float]:
    """A chat that grows in one process, by answers with lists, tables and code.

    Returns processor seconds per second of streaming in the short and in the long chat, KiB of memory per message, and
    seconds until the program has been left.
    """
    store = SessionStore(folder / "grown.db")
    backend = TimedBackend(RICH)
    app = ChatApp(backend, store, "timed")
    process = psutil.Process()
    async with app.run_test(size=(120, 40)) as pilot:
        chat = app.screen
        assert isinstance(chat, ChatScreen)
        while chat.info is None:
            await pilot.pause(0.01)

        async def ask(speed: int) -> float:
            """Ask, and return the processor seconds per second until the answer has ended."""
            backend.speed = speed
            chat.prompt.insert("Tell me how to do it.")
            chat.prompt.action_send()
            while not chat.busy:
                await asyncio.sleep(0.001)
            spent, began = process.cpu_times(), time.monotonic()
            while chat.busy:
                await asyncio.sleep(0.01)
            now = process.cpu_times()
            return (now.user + now.system - spent.user - spent.system) / (time.monotonic() - began)

        for _ in range(WINDOW):  # until as much is mounted as will ever be
            await ask(0)
        short = await ask(USUAL_SPEED)
        gc.collect()
        memory = process.memory_info().rss
        for _ in range(GROWN // 2):
            await ask(0)
        gc.collect()
        memory = process.memory_info().rss - memory
        long = await ask(USUAL_SPEED)
        left = time.monotonic()
    left = time.monotonic() - left
    store.close()
    return short, long, memory / GROWN / 2**10, left


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all values are."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    """Print every figure with its budget."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        paint, least = first_paint()
        echo, lag, late = asyncio.run(streaming(folder))
        short, long, message, left = asyncio.run(grown(folder))
        took, memory = asyncio.run(long_chat(folder))
        kept, again, cached = resumed(folder, sys.argv[1] if len(sys.argv) > 1 else BUILT_IN)
    rows = [
        ("start to first paint, no model", f"{paint:.2f} s", "0.60 s"),
        ("the same of an application of two words", f"{least:.2f} s", ""),
        (f"typing echo p95 at {SPEED} tok/s", f"{percentile(echo, 0.95) * 1000:.0f} ms", "50 ms"),
        (f"loop lag p95 at {SPEED} tok/s", f"{percentile(lag, 0.95) * 1000:.0f} ms", ""),
        (f"answer of {SECONDS} s ends late by", f"{late * 1000:.0f} ms", ""),
        (f"processor time per second at {USUAL_SPEED} tok/s", f"{short * 100:.0f} %", "10 %"),
        (f"the same {GROWN} messages later", f"{long * 100:.0f} %", "10 %"),
        ("memory of a message", f"{message:.0f} KiB", "50 KiB"),
        (f"leaving a chat of {GROWN} messages", f"{left:.2f} s", "1 s"),
        (f"opening a chat of {LONG} messages", f"{took:.2f} s", ""),
        (f"memory that {LONG} messages add", f"{memory:.0f} MiB", ""),
        (f"first token after a restart, {cached} from disk", f"{kept * 1000:.0f} ms", ""),
        ("the same without the cache on disk", f"{again * 1000:.0f} ms", ""),
    ]
    for name, value, budget in rows:
        sys.stdout.write(f"{name:<48}{value:>10}   {f'budget {budget}' if budget else ''}\n")


if __name__ == "__main__":
    main()
