"""A chat that never pays twice: what its next turn costs, in the same process and in a new one.

    conversation.py MODEL.gguf TEXT.txt [--tokens 3000] [--threads N]

The first message quotes so many tokens of the text. For every turn: where its prompt's KV came from, how many tokens
were computed, and the time to the first token; at last the time of restoring against that of the prefill it saves.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.engine_tools import answer, ask, serve, table, text_tokens

ANSWER, QUESTION = 32, 24


def measure(path: Path, text: str, tokens: int, threads: int | None, folder: Path) -> None:
    """Run the chat, with a restart after its second turn, and print the table."""
    served = serve(path, threads, folder)
    chat = list(text_tokens(served.tokenizer, text, tokens))
    ask(served.engine, text_tokens(served.tokenizer, text, 64, start=200_000), 4)  # wakes threads and pages
    rows: list[list[object]] = []
    ttft: dict[str, float] = {}
    for turn in ("1", "2", "3, after a restart", "4"):
        if turn.startswith("3"):
            served.engine.close()
            served = serve(path, threads, folder)
            time.sleep(0.5)
        last, said = answer(served.engine, chat, ANSWER)
        counts = last.counts
        ttft[turn[0]] = last.timings.ttft_s
        rows.append(
            [
                turn,
                counts.prompt,
                counts.cached_memory,
                counts.cached_disk,
                counts.prompt - counts.cached,
                last.timings.ttft_s,
            ]
        )
        chat += [*said, *text_tokens(served.tokenizer, text, QUESTION, start=100_000 + 1000 * len(rows))]
    served.engine.close()
    headings = ("turn", "prompt", "cached, memory", "cached, disk", "computed", "TTFT s")
    table(headings, rows)
    sys.stdout.write(f"TTFT restored from disk / prefilled: {ttft['3'] / ttft['1']:.1%} (goal: at most 10 %)\n")


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments.model, text, arguments.tokens, arguments.threads, Path(folder))


if __name__ == "__main__":
    main()
