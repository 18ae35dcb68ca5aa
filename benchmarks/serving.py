"""Many users at once: Poisson arrivals with the lengths of real requests, with batching and prefix sharing on and off.

    serving.py MODEL.gguf TEXT.txt TRACE.csv [--requests 40] [--load 1.5] [--scale 8] [--system 96]
        [--ttft 0.25] [--tpot 0.02] [--threads N]

Lengths come from the Azure conversation trace (columns TIMESTAMP, ContextTokens, GeneratedTokens), divided by `scale`.
Every prompt begins with a system prompt of `system` tokens; with prefix sharing off, the first token differs, so that
nothing can be reused. `load` is the arrival rate in multiples of what serving one request at a time could handle. The
same arrivals are used for all four settings. SLO: TTFT within --ttft seconds, time per token within --tpot seconds.
"""

import argparse
import csv
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.engine_tools import GREEDY, Served, ask, percentile, serve, table, text_tokens
from localllm.engine.request import GenerationRequest

PERCENTILES = (0.5, 0.95, 0.99)


@dataclass
class Visit:
    """One request, and when its tokens arrived, in seconds after its submission."""

    arrival: float
    prompt: tuple[int, ...]
    answer: int
    came: list[float] = field(default_factory=list)

    @property
    def per_token(self) -> float:
        """Mean time per token after the first."""
        return (self.came[-1] - self.came[0]) / max(len(self.came) - 1, 1)


def visits(served: Served, text: str, trace: Path, arguments: argparse.Namespace, alone_s: float) -> list[Visit]:
    """The requests to send."""
    rng = np.random.default_rng(7)
    with trace.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    chosen = [rows[at] for at in rng.choice(len(rows), arguments.requests, replace=False)]
    gaps = rng.exponential(alone_s / arguments.load, arguments.requests)
    source = text_tokens(served.tokenizer, text, 20_000)
    longest = served.engine.context - arguments.system - 8
    made = []
    for arrival, row in zip(np.cumsum(gaps), chosen, strict=True):
        answer = max(int(row["GeneratedTokens"]) // arguments.scale, 2)
        own = min(max(int(row["ContextTokens"]) // arguments.scale, 4), longest - answer)
        start = int(rng.integers(arguments.system, len(source) - own))
        made.append(Visit(float(arrival), (*source[: arguments.system], *source[start : start + own]), answer))
    return made


def play(served: Served, visits: Sequence[Visit], shared: bool) -> float:
    """Send every request at its time, wait for all, and return the seconds taken."""
    began = time.monotonic()

    def follow(visit: Visit, number: int) -> None:
        prompt = visit.prompt if shared else (100 + number, *visit.prompt[1:])
        submitted = time.monotonic()
        request = GenerationRequest(prompt, GREEDY, max_tokens=visit.answer, ignore_eos=True)
        visit.came = []
        for event in served.engine.submit(request):
            visit.came += [time.monotonic() - submitted] * len(event.token_ids)

    threads = []
    for number, visit in enumerate(visits):
        time.sleep(max(began + visit.arrival - time.monotonic(), 0))
        threads.append(threading.Thread(target=follow, args=(visit, number)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def figures(visits: Sequence[Visit]) -> dict[str, list[float]]:
    """Milliseconds by measure, one value per request or per token."""
    return {
        "TTFT": [1e3 * visit.came[0] for visit in visits],
        "ITL": [1e3 * gap for visit in visits for gap in np.diff(visit.came).tolist()],
        "TPOT": [1e3 * visit.per_token for visit in visits],
        "E2E": [1e3 * visit.came[-1] for visit in visits],
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--load", type=float, default=1.5)
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--system", type=int, default=96)
    parser.add_argument("--ttft", type=float, default=0.25, help="SLO in seconds")
    parser.add_argument("--tpot", type=float, default=0.02, help="SLO in seconds")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    served = serve(arguments.model, arguments.threads)
    for start in (0, 40_000):  # the first is a warm-up
        alone = ask(served.engine, text_tokens(served.tokenizer, text, 120, start), 24).timings
    wanted = visits(served, text, arguments.trace, arguments, alone.ttft_s + alone.decode_s)
    served.engine.close()
    rows = []
    for batching, shared in ((True, True), (True, False), (False, True), (False, False)):
        served = serve(arguments.model, arguments.threads, max_running=8 if batching else 1, max_waiting=10_000)
        ask(served.engine, text_tokens(served.tokenizer, text, 64, 70_000), 4)
        took = play(served, wanted, shared)
        served.engine.close()
        good = sum(visit.came[0] <= arguments.ttft and visit.per_token <= arguments.tpot for visit in wanted)
        tokens = sum(len(visit.came) for visit in wanted)
        cells = [
            " / ".join(f"{percentile(values, share):.0f}" for share in PERCENTILES)
            for values in figures(wanted).values()
        ]
        rows.append(["on" if batching else "off", "on" if shared else "off", *cells, tokens / took, good / took])
    head = ("batching", "prefixes", "TTFT ms", "ITL ms", "TPOT ms", "E2E ms", "tok/s", "goodput/s")
    table(head, rows)
    sys.stdout.write(
        f"p50 / p95 / p99. {len(wanted)} requests, {len(wanted) / wanted[-1].arrival:.2f} a second. "
        f"SLO: TTFT {1e3 * arguments.ttft:.0f} ms, {1e3 * arguments.tpot:.0f} ms a token.\n"
    )


if __name__ == "__main__":
    main()
