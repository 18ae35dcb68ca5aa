"""What a chat of a model with sliding windows computes and takes: after a turn, an edit, a branch, a restart.

    windows.py MODEL.gguf [--turns 20] [--words 300] [--threads 2] [--restart TOKENS [--parts N]]
               [--llama-server PROGRAM]

Each turn is a message of random words and a short answer. New tokens are those after the longest prefix that any
earlier prompt or answer had. The last columns are the memory of the pages that sequences take, that of a pool which
keeps all tokens of all layers, the files of the disk tier, and what was read from files during the answer (on Linux).

--restart measures one thing instead: the time to the first token of a prompt of so many tokens when it is computed, and
of a longer one after a restart, with what that reads from the disk. With --parts, only a window and N parts of 512
tokens at equal distances are computed and timed, and the rest is their average; the conversation on disk then consists
of copies of the first pages, which take as long to read.

--llama-server names llama.cpp's own server. It then gets the same messages, with windows only and with --swa-full,
which keeps all tokens of all layers. Its restart stops it and starts it again.
"""

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from benchmarks.engine_tools import KV_BYTES, answer, serve, table
from benchmarks.servers import llama_server
from gguf_io import load_tokenizer, open_model
from gguf_io.tokenizer import Tokenizer
from localllm.engine.disk_cache import SEGMENT_TOKENS, DiskCache
from localllm.engine.prefix_cache import common_prefix
from models.config import read_config
from models.kv_layout import kv_bytes_per_token, stored_types
from models.native_runner import NativeRunner

MIB = 2**20
ANSWER = 40
CONTEXT = 32_768
ANSWER_S = 600
PART = 512
WORDS = ("the", "a", "ship", "river", "old", "green", "sails", "stone", "keeps", "slowly", "night", "under", "door")


def bytes_read() -> int:
    """Bytes that this process has read from files."""
    counters = Path("/proc/self/io")
    return int(counters.read_text().split()[1]) if counters.exists() else 0


@dataclass
class Answer:
    """One answer: its tokens, those of the prompt that were computed, seconds to the first of its tokens."""

    tokens: list[int]
    computed: int
    seconds: float


class System(Protocol):
    """What is measured: a program that answers, and remembers prompts."""

    def start(self) -> None:
        """Load the model."""

    def stop(self) -> None:
        """Write what is to outlast the process, and unload the model."""

    def answer(self, prompt: list[int], shared_prefix: int) -> Answer:
        """Generate ANSWER tokens, greedily. shared_prefix: tokens of the prompt that chats share."""

    def memory(self) -> tuple[str, ...]:
        """The row's last columns, in MiB."""


class OwnEngine:
    """Our engine on a model, with a disk tier in a folder."""

    def __init__(self, model: Path, threads: int, folder: Path) -> None:
        self._model, self._threads, self._folder = model, threads, folder
        with open_model(model) as file:
            config = read_config(file)
        self._per_token = kv_bytes_per_token(config, stored_types(config, ("f16", "f16")))

    def start(self) -> None:
        """Load the model."""
        self._engine = serve(self._model, self._threads, self._folder).engine
        self._runner = self._engine.runner

    def stop(self) -> None:
        """Write what is not on disk yet, and unload the model."""
        self._engine.close()

    def answer(self, prompt: list[int], shared_prefix: int) -> Answer:
        """Generate an answer. shared_prefix: tokens of the prompt that chats share."""
        before = bytes_read()
        last, tokens = answer(self._engine, prompt, ANSWER, shared_prefix=shared_prefix)
        self._read = bytes_read() - before
        return Answer(list(tokens), last.counts.prompt - last.counts.cached, last.timings.ttft_s)

    def memory(self) -> tuple[str, ...]:
        """MiB of pages that are held, of all tokens of all layers, of files on disk, and read by the last answer."""
        info = self._runner.info
        held = (info.pages_total - self._runner.pages_free()) * info.page_size * info.kv_bytes_per_token
        everything = int((self._runner.page_holders() > 0).sum()) * info.page_size * self._per_token
        disk = sum(path.stat().st_size for path in self._folder.rglob("*.kv"))
        return tuple(f"{size / MIB:.0f}" for size in (held, everything, disk, self._read))


class Peer:
    """llama.cpp's own server. flags: further options of its command line."""

    def __init__(self, program: str, model: Path, threads: int, flags: tuple[str, ...]) -> None:
        self._command = (program, model, threads, CONTEXT)
        self._flags = flags
        self._running = contextlib.ExitStack()

    def start(self) -> None:
        """Start the server."""
        self._url = self._running.enter_context(llama_server(*self._command, flags=self._flags)).url

    def stop(self) -> None:
        """Stop the server."""
        self._running.close()

    def answer(self, prompt: list[int], shared_prefix: int) -> Answer:
        """Generate an answer. shared_prefix: ignored, since llama.cpp finds common prefixes by itself."""
        body = {"prompt": prompt, "n_predict": ANSWER, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        reply = httpx.post(f"{self._url}/completion", json=body | {"return_tokens": True}, timeout=ANSWER_S)
        reply.raise_for_status()
        fields = reply.json()
        return Answer(fields["tokens"], fields["timings"]["prompt_n"], fields["timings"]["prompt_ms"] / 1_000)

    def memory(self) -> tuple[str, ...]:
        """Nothing: the server does not tell."""
        return ()


class Chat:
    """The conversations of the benchmark, and what was asked so far."""

    def __init__(self, system: System, tokenizer: Tokenizer, words: int) -> None:
        self.system = system
        self._tokenizer, self._words = tokenizer, words
        self._random = random.Random(1)
        self.known: list[list[int]] = []

    def message(self) -> list[int]:
        """The tokens of a message of random words."""
        words = [self._random.choice(WORDS) for _ in range(self._words)]
        return self._tokenizer.encode(" ".join(words) + ". ")

    def ask(self, name: str, prompt: list[int], shared_prefix: int = 0) -> tuple[tuple[str, ...], list[int]]:
        """Generate an answer; return the table's row, and prompt and answer."""
        new = max(len(prompt) - max([common_prefix(prompt, known) for known in self.known], default=0), 1)
        found = self.system.answer(prompt, shared_prefix)
        whole = [*prompt, *found.tokens]
        self.known.append(whole)
        figures = f"{len(prompt):,}", f"{new:,}", f"{found.computed:,}", f"{found.computed / new:.2f}"
        return (name, *figures, f"{found.seconds:.2f}", *self.system.memory()), whole


def rows(chat: Chat, turns: int) -> Iterator[tuple[str, ...]]:
    """All requests of the benchmark."""
    chat.system.start()
    system = chat.message()
    text, ends = system, [len(system)]
    for turn in range(turns):
        text = [*text, *chat.message()]
        row, text = chat.ask(f"turn {turn + 1}", text, shared_prefix=len(system))
        ends.append(len(text))
        if turn in (0, turns - 1):
            yield row
    yield chat.ask("regenerate", text[:-ANSWER])[0]
    yield chat.ask("the last message edited", [*text[: ends[-2]], *chat.message()])[0]
    tenth = ends[-min(11, turns)]
    row, branch = chat.ask("an edit ten turns back", [*text[:tenth], *chat.message()])
    yield row
    row, first = chat.ask("back to the first branch", [*text, *chat.message()])
    yield row
    yield chat.ask("and to the second", [*branch, *chat.message()])[0]
    middle = (ends[1] + ends[2]) // 2
    yield chat.ask("an edit within an early message", [*text[:middle], *chat.message()])[0]
    yield chat.ask("another chat, the same system text", [*system, *chat.message()])[0]
    chat.system.stop()
    chat.system.start()
    yield chat.ask("a turn after a restart", [*first, *chat.message()])[0]
    yield chat.ask("an edit after a restart", [*text, *chat.message()])[0]
    chat.system.stop()


def in_parts(model: Path, threads: int, text: list[int], parts: int, folder: Path) -> float:
    """Seconds to compute a text, from a window and parts of it. Fills the disk tier as if all had been computed."""
    with open_model(model) as file:
        runner = NativeRunner(file, kv_bytes=KV_BYTES, threads=threads)
    disk, sequence, seconds = DiskCache(folder, runner.info.kv_layout), runner.create_sequence(), []

    def compute(count: int) -> float:
        """Append so many rows; return the seconds per token."""
        began = time.monotonic()
        for at in range(0, count, PART):
            start, rows = runner.sequence_length(sequence), min(PART, count - at)
            runner.run(text[start : start + rows], range(start, start + rows), [sequence] * rows, [rows - 1])
        return (time.monotonic() - began) / count

    first = max(PART, runner.info.window_tokens // PART * PART + PART)
    of_first = compute(first)
    pages, window = runner.export_kv(sequence, 0, SEGMENT_TOKENS), runner.export_state(sequence, first)

    def fill(end: int) -> None:
        """Append copies of the first pages, and of the window."""
        for start in range(runner.sequence_length(sequence), end, SEGMENT_TOKENS):
            runner.import_kv(sequence, start, start + SEGMENT_TOKENS, pages)
        runner.import_state(sequence, window)

    for part in range(parts):
        middle = first + (len(text) - first) * (2 * part + 1) // (2 * parts)
        fill(max(runner.sequence_length(sequence), (middle - PART // 2) // SEGMENT_TOKENS * SEGMENT_TOKENS))
        seconds.append(compute(PART))
    fill(len(text))
    for start in range(0, len(text), SEGMENT_TOKENS):
        stop = start + SEGMENT_TOKENS
        state = window if stop == len(text) else b""
        disk.store(text[:stop], start, runner.export_kv(sequence, start, stop), state)
    runner.close()
    return first * of_first + (len(text) - first) * statistics.mean(seconds)


def restart_in_parts(
    model: Path, threads: int, chat: Chat, count: int, parts: int, folder: Path
) -> Iterator[tuple[str, ...]]:
    """As `restart`, see the top of this file for the difference."""
    text: list[int] = []
    while len(text) < count:
        text += chat.message()
    text = text[: count // SEGMENT_TOKENS * SEGMENT_TOKENS]
    seconds = in_parts(model, threads, text, parts, folder)
    size = f"{len(text):,}"
    yield (f"computed (from {parts} parts)", size, size, size, "1.00", f"{seconds:.2f}", *[""] * 4)
    chat.system.start()
    chat.known.append(text)
    yield chat.ask("after a restart", [*text, *chat.message()])[0]
    chat.system.stop()


def restart(chat: Chat, count: int) -> Iterator[tuple[str, ...]]:
    """A prompt of about `count` tokens, computed, and the same with another message after a restart."""
    text: list[int] = []
    while len(text) < count:
        text += chat.message()
    chat.system.start()
    row, text = chat.ask("computed", text)
    yield row
    chat.system.stop()
    chat.system.start()
    yield chat.ask("after a restart", [*text, *chat.message()])[0]
    chat.system.stop()


def main() -> None:
    """Parse the command line and print a table for each system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--restart", type=int, metavar="TOKENS")
    parser.add_argument("--parts", type=int, default=0, metavar="N")
    parser.add_argument("--llama-server", metavar="PROGRAM")
    arguments = parser.parse_args()
    model, threads, program = arguments.model, arguments.threads, arguments.llama_server
    with open_model(model) as file:
        tokenizer = load_tokenizer(file)

    def measured(system: System) -> list[tuple[str, ...]]:
        chat = Chat(system, tokenizer, arguments.words)
        return list(restart(chat, arguments.restart) if arguments.restart else rows(chat, arguments.turns))

    heads = ("request", "prompt", "new", "computed", "ratio", "first token, s")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        own = OwnEngine(model, threads, folder)
        chat = Chat(own, tokenizer, arguments.words)
        found = (
            list(restart_in_parts(model, threads, chat, arguments.restart, arguments.parts, folder))
            if arguments.restart and arguments.parts
            else measured(own)
        )
        table((*heads, "MiB held", "all kept", "MiB on disk", "MiB read"), found)
    for flags in ((), ("--swa-full",)) if program else ():
        sys.stdout.write(f"\n{' '.join(('llama-server', *flags))}\n")
        table(heads, measured(Peer(program, model, threads, flags)))


if __name__ == "__main__":
    main()
