"""Where the time goes from starting a process to its first token, with kernels and file in their caches.

    start.py MODEL.gguf [--threads N] [--rounds 5] [--json]

Each round is a new process that does what `localllm run` does, a stage after the other, and stops at the first token of
a prompt of one token. Stages are told in milliseconds of wall time and of processor time of all threads, medians of the
rounds: on a busy machine the second says more. In turn, one process maps packed weights and the next packs the model's.
The first process, which fills the caches, does not count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.engine_tools import table

NAMES = ("packed wall ms", "packed cpu ms", "fresh wall ms", "fresh cpu ms")
CHILD = """
import json, os, sys, threading, time
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
    "compiling kernels for this CPU, once": "header, kernels' declarations",
    "loading weights": "kernels from the cache",
}
def progress(what, share):
    if what in begun:
        stage(begun.pop(what))
model = load_model(path, settings, progress)
stage("packing weights, tokenizer")
first = model.tokenizer.bos_id or 1
request = GenerationRequest((first,), SamplingParams(temperature=0), max_tokens=1, ignore_eos=True)
model.engine.submit(request).collect()
stage("first token")
assert not begun
for thread in threading.enumerate():
    if thread.name == "packed-keeper" and sys.argv[3:]:
        thread.join()
print(json.dumps(stages), flush=True)
os._exit(0)
"""


def start(model: Path, threads: int, *, packed: bool = True, fills: bool = False) -> dict[str, tuple[float, float]]:
    """Wall and processor seconds of each stage of one process. fills: it waits until packed weights are written."""
    began = time.time()
    command = [sys.executable, "-c", CHILD, str(model), str(threads), *(["fill"] if fills else [])]
    variables = {**os.environ, **({} if packed else {"LOCALLLM_PACKED_MIB": "0"})}
    stages = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=variables).stdout)
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
    start(arguments.model, arguments.threads, fills=True)
    rounds = [
        [start(arguments.model, arguments.threads, packed=packed) for packed in (True, False)]
        for _ in range(arguments.rounds)
    ]
    places = [(kind, column) for kind in (0, 1) for column in (0, 1)]
    rows = [
        (name, *(statistics.median(1000 * each[kind][name][column] for each in rounds) for kind, column in places))
        for name in rounds[0][0]
    ]
    totals = [
        statistics.median(1000 * sum(pair[column] for pair in each[kind].values()) for each in rounds)
        for kind, column in places
    ]
    rows.append(("all", *totals))
    if arguments.json:
        sys.stdout.write(json.dumps([dict(zip(("stage", *NAMES), row, strict=True)) for row in rows]) + "\n")
    else:
        table(("stage", *NAMES), rows)


if __name__ == "__main__":
    main()
