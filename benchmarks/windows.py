"""What a chat of a model with sliding windows computes and takes: after a turn, an edit, a branch, a restart.

    windows.py MODEL.gguf [--turns 20] [--words 300] [--threads 2]

Each turn is a message of random words and a short answer. New tokens are those after the longest prefix that any
earlier prompt or answer had. The last two columns are the pool's memory that sequences take, beside that of a pool
which keeps all tokens of all layers, and the files of the disk tier.
"""

import argparse
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_tools import answer, serve, table
from gguf_io import open_model
from localllm.engine.prefix_cache import common_prefix
from models.config import read_config
from models.kv_layout import kv_bytes_per_token, stored_types

MIB = 2**20
ANSWER = 40
WORDS = ("the", "a", "ship", "river", "old", "green", "sails", "stone", "keeps", "slowly", "night", "under", "door")


@dataclass
class Row:
    """One request: its name, tokens of the prompt, new ones, computed ones, seconds to the first token."""

    name: str
    prompt: int
    new: int
    computed: int
    seconds: float
    held: float
    whole: float
    disk: float


class Chat:
    """An engine on a model, with a disk tier in a folder, and what was asked so far."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._random = random.Random(1)
        self._known: list[list[int]] = []
        self.start()

    def start(self) -> None:
        """Load the model."""
        self._served = serve(self._arguments.model, self._arguments.threads, self._folder)
        self._runner = self._served.engine.runner
        with open_model(self._arguments.model) as file:
            config = read_config(file)
        self._per_token = kv_bytes_per_token(config, stored_types(config, ("f16", "f16")))

    def stop(self) -> None:
        """Write what is not on disk yet, and unload the model."""
        self._served.engine.close()

    def message(self) -> list[int]:
        """The tokens of a message of random words."""
        words = [self._random.choice(WORDS) for _ in range(self._arguments.words)]
        return self._served.tokenizer.encode(" ".join(words) + ". ")

    def ask(self, name: str, prompt: list[int], trunk: int = 0) -> tuple[Row, list[int]]:
        """Generate an answer; return the row, and prompt and answer."""
        new = len(prompt) - max([common_prefix(prompt, known) for known in self._known], default=0)
        last, tokens = answer(self._served.engine, prompt, ANSWER, trunk=trunk)
        computed = last.counts.prompt - last.counts.cached
        whole = [*prompt, *tokens]
        self._known.append(whole)
        info = self._runner.info
        held = (info.pages_total - self._runner.pages_free()) * info.page_size * info.kv_bytes_per_token / MIB
        holders = self._runner.page_holders()
        everything = int((holders > 0).sum()) * info.page_size * self._per_token / MIB
        disk = sum(path.stat().st_size for path in self._folder.rglob("*.kv")) / MIB
        return Row(name, len(prompt), max(new, 1), computed, last.timings.ttft_s, held, everything, disk), whole


def rows(chat: Chat, turns: int) -> Iterator[Row]:
    """All requests of the benchmark."""
    system = chat.message()
    text, ends = system, [len(system)]
    for turn in range(turns):
        text = [*text, *chat.message()]
        row, text = chat.ask(f"turn {turn + 1}", text, trunk=len(system))
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
    chat.stop()
    chat.start()
    yield chat.ask("a turn after a restart", [*first, *chat.message()])[0]
    yield chat.ask("an edit after a restart", [*text, *chat.message()])[0]


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chat = Chat(arguments, Path(folder))
        shown = [
            (
                row.name,
                f"{row.prompt:,}",
                f"{row.new:,}",
                f"{row.computed:,}",
                f"{row.computed / row.new:.2f}",
                f"{row.seconds:.2f}",
                f"{row.held:.0f}",
                f"{row.whole:.0f}",
                f"{row.disk:.0f}",
            )
            for row in rows(chat, arguments.turns)
        ]
        chat.stop()
    heads = ("request", "prompt", "new", "computed", "ratio", "first token, s", "MiB held", "all kept", "MiB on disk")
    table(heads, shown)


if __name__ == "__main__":
    main()
