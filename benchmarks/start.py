"""Where the time goes from starting a process to its first token, with kernels and file in their caches.

    start.py MODEL.gguf [--threads N] [--rounds 5] [--json]

Each round is a new process that does what `localllm run` does, a stage after the other, and stops at the first token of
a prompt of one token. Stages are told in milliseconds of wall time and of processor time of all threads, medians of the
rounds: on a busy machine the second says more. The first process, which fills the caches, does not count.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.engine_tools import table

CHILD = """
import json, os, sys, time
stages = []
def stage(name):
    stages.append((name, time.time(), sum(os.times()[:2])))
stage("interpreter")
import localllm.cli.main
stage("command line")
from localllm.engine.loaded_model import load_model
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.settings import load_settings
stage("imports")
path, threads = sys.argv[1], int(sys.argv[2]) or None
settings = load_settings({"backend": "native", "threads": threads, "disk_cache": False})
begun = {
    "loading weights": "header, kernels' declarations",
    "compiling kernels for this CPU, once": "packing weights, tokenizer",
}
def progress(what, share):
    if what in begun:
        stage(begun.pop(what))
model = load_model(path, settings, progress)
stage("kernels from the cache")
first = model.tokenizer.bos_id or 1
request = GenerationRequest((first,), SamplingParams(temperature=0), max_tokens=1, ignore_eos=True)
model.engine.submit(request).collect()
stage("first token")
assert not begun
print(json.dumps(stages), flush=True)
os._exit(0)
"""


def start(model: Path, threads: int) -> dict[str, tuple[float, float]]:
    """Wall and processor seconds of each stage of one process."""
    began = time.time()
    command = [sys.executable, "-c", CHILD, str(model), str(threads)]
    stages = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    spent = {}
    wall, processor = began, 0.0
    for name, at, used in stages:
        spent[name] = (at - wall, used - processor)
        wall, processor = at, used
    return spent


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=0, help="0 for all cores")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    start(arguments.model, arguments.threads)
    rounds = [start(arguments.model, arguments.threads) for _ in range(arguments.rounds)]
    rows = [
        (name, *(statistics.median(1000 * one[name][column] for one in rounds) for column in (0, 1)))
        for name in rounds[0]
    ]
    totals = [
        statistics.median(1000 * sum(pair[column] for pair in one.values()) for one in rounds) for column in (0, 1)
    ]
    rows.append(("all", *totals))
    if arguments.json:
        sys.stdout.write(
            json.dumps([dict(zip(("stage", "wall_ms", "cpu_ms"), row, strict=True)) for row in rows]) + "\n"
        )
    else:
        table(("stage", "wall ms", "processor ms"), rows)


if __name__ == "__main__":
    main()
