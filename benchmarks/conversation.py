"""A chat whose prefix is never computed twice: the cost of its next turn, an edited one, and one in a new process.

    conversation.py MODEL.gguf TEXT.txt [--tokens 3000] [--threads N]

The first message quotes --tokens tokens of the text. For every turn: where its prompt's KV came from, how many tokens
were computed, and the time to the first token; finally the time to restore from disk against the prefill that it saves,
and the process's peak memory before its restart.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_tools import answer, ask, serve, table, text_tokens
from gguf_io import load_tokenizer, open_model

ANSWER, QUESTION = 32, 24
RESTARTED = "3, after a restart"
TURNS = ("1", "2", "2, its last message edited", RESTARTED, "4")


@dataclass
class Chat:
    """The tokens of a chat's next prompt, which grows with its turns."""

    text: tuple[int, ...]
    prompt: list[int]
    before: int = 0  # tokens before the last message

    def turns(self) -> Iterator[tuple[str, list[int]]]:
        """Each turn's name and prompt; the caller calls `answered` between them."""
        for at, turn in enumerate(TURNS):
            if "edited" in turn:
                self.prompt = self.prompt[: self.before] + self._question(at)
            elif at:
                self.before = len(self.prompt)
                self.prompt += self._question(at)
            yield turn, self.prompt

    def answered(self, turn: str, said: tuple[int, ...]) -> None:
        """Append an answer, unless the next turn edits this one."""
        if turn != "2":
            self.prompt += said

    def _question(self, at: int) -> list[int]:
        return list(self.text[-(at + 1) * QUESTION :][:QUESTION])


def measure(path: Path, chat: Chat, warm_up: tuple[int, ...], threads: int | None, folder: Path) -> None:
    """Run the chat, with a restart before its third turn, and print the table."""
    served = serve(path, threads, folder)
    ask(served.engine, warm_up, 4)  # starts threads and touches pages
    rows: list[list[object]] = []
    ttft: dict[str, float] = {}
    for turn, prompt in chat.turns():
        if turn == RESTARTED:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            served.engine.close()
            served = serve(path, threads, folder)
            time.sleep(0.5)
        last, said = answer(served.engine, prompt, ANSWER)
        counts = last.counts
        ttft[turn] = last.timings.ttft_s
        computed = counts.prompt - counts.cached
        rows.append([turn, counts.prompt, counts.cached_memory, counts.cached_disk, computed, last.timings.ttft_s])
        chat.answered(turn, said)
    served.engine.close()
    table(("turn", "prompt", "cached, memory", "cached, disk", "computed", "TTFT s"), rows)
    sys.stdout.write(f"TTFT restored from disk / prefilled: {ttft[RESTARTED] / ttft['1']:.1%} (goal: at most 10 %)\n")
    sys.stdout.write(f"Most memory: {peak:.0f} MiB for a file of {path.stat().st_size / 2**20:.0f} MiB\n")


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with open_model(arguments.model) as file:
        tokenizer = load_tokenizer(file)
    text = arguments.text.read_text(encoding="utf-8")
    spoken = text_tokens(tokenizer, text, len(TURNS) * QUESTION, start=100_000)
    first, warm_up = text_tokens(tokenizer, text, arguments.tokens), text_tokens(tokenizer, text, 64, start=200_000)
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments.model, Chat(spoken, list(first)), warm_up, arguments.threads, Path(folder))


if __name__ == "__main__":
    main()
