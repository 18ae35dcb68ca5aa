"""What draft trees could gain over chains, from the cost of rows on this machine and how often guesses are right.

    draft_trees.py MODEL.gguf [--rank 0.81 0.066 0.02] [--drafting 0.15] [--rounds 5] [--threads N] [--processor-time]

A chain drafts the likeliest token at each position; a tree also drafts others, verified in the same step. --rank: how
often the model's token is the drafter's first, second, third guess, at each position. --drafting: time to draft one
position, in steps of one row; in a tree, all guesses of one depth are assumed to cost as much as one. So trees are
rated at their best: their rows cost as much as rows of a chain, as if attention had masks for them. Prints the best
size of each.
"""

import argparse
import heapq
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.engine_tools import KV_BYTES, chosen_clock, medians, table
from gguf_io import open_model
from models.native_runner import NativeRunner

PREFIX, MOST_ROWS = 256, 16


def tree_tokens(ranks: list[float], nodes: int) -> tuple[float, int]:
    """The average tokens per step with the best tree of `nodes` drafted tokens, and its depth."""
    expected, deepest, number = 1.0, 0, 0
    waiting = [(-ranks[0], 1, number, 0)]  # probability that it is reached and right, depth, order, rank
    for _ in range(nodes):
        chance, depth, _, rank = heapq.heappop(waiting)
        expected, deepest = expected - chance, max(deepest, depth)
        if rank + 1 < len(ranks):
            number += 1
            heapq.heappush(waiting, (chance / ranks[rank] * ranks[rank + 1], depth, number, rank + 1))
        number += 1
        heapq.heappush(waiting, (chance * ranks[0], depth + 1, number, 0))
    return expected, deepest


def row_costs(path: Path, rounds: int, threads: int | None, clock: Callable[[], float]) -> list[float]:
    """Seconds of a step of 1, 2, ... MOST_ROWS rows after PREFIX tokens."""
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=KV_BYTES // 4, threads=threads, drafts=False)
    sequence = runner.create_sequence()
    runner.run([1] * PREFIX, range(PREFIX), [sequence] * PREFIX, [PREFIX - 1])

    def step(rows: int) -> float:
        began = clock()
        runner.run([1] * rows, range(PREFIX, PREFIX + rows), [sequence] * rows, range(rows))
        took = clock() - began
        runner.truncate_sequence(sequence, PREFIX)
        return took

    found = medians(rounds, {str(rows): lambda rows=rows: step(rows) for rows in range(1, MOST_ROWS + 1)})
    runner.close()
    return list(found.values())


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=float, nargs="+", default=[0.81, 0.066, 0.02])
    parser.add_argument("--drafting", type=float, default=0.15)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--processor-time", action="store_true")
    arguments = parser.parse_args()
    clock = chosen_clock(parser, arguments)
    seconds = row_costs(arguments.model, arguments.rounds, arguments.threads, clock)
    costs = [each / seconds[0] for each in seconds]
    sys.stdout.write("steps of 1, 2, ... rows, in steps of one: " + ", ".join(f"{each:.2f}" for each in costs) + "\n\n")

    def best(ranks: list[float]) -> tuple[float, int, int]:
        speeds = []
        for nodes in range(1, MOST_ROWS):
            tokens, depth = tree_tokens(ranks, nodes)
            speeds.append((tokens / (costs[nodes] + depth * arguments.drafting), nodes, depth))
        return max(speeds)

    rows = []
    for scale in (1.0, 0.75, 0.5):
        ranks = [arguments.rank[0] * scale, *arguments.rank[1:]]
        if scale < 1:  # the first guess's loss goes to the others
            rest = (1 - ranks[0]) / (1 - arguments.rank[0])
            ranks = [ranks[0], *(each * rest for each in arguments.rank[1:])]
        chain, tree = best(ranks[:1]), best(ranks)
        rows.append([", ".join(f"{each:.2f}" for each in ranks), *chain, *tree, tree[0] / chain[0]])
    table(("right", "chain: times", "tokens", "places", "tree: times", "tokens", "places", "tree / chain"), rows)


if __name__ == "__main__":
    main()
