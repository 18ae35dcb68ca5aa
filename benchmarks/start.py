"""Where time goes from the start of a process to its first token, with kernels and file in their caches.

    start.py MODEL.gguf [--threads N] [--rounds 5] [--json]
    start.py builtin --cold [--rounds 3]

Each round is a new process that does what `localllm run` does, stage by stage, and stops at the first token of a prompt
of one token. Stages are shown in milliseconds of wall time and of processor time of all threads, as medians of the
rounds: on a busy machine the second is more reliable. Processes that map packed weights and processes that pack the
model's alternate. The first process, which fills the caches, does not count. The last row is `localllm run` itself,
from its start to the first character of its answer.

--cold measures the first start after an installation: the cache is empty in each round, so kernels are compiled.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engine_tools import table
from models import builtin

RUN = "localllm run"
NAMES = ("packed wall ms", "packed cpu ms", "fresh wall ms", "fresh cpu ms")
CHILD = """
import json, os, sys, threading, time
stages = []
def stage(name):
    stages.append((name, time.monotonic(), sum(os.times()[:4])))
stage("interpreter")
import localllm.cli.main
stage("command line")
from localllm.placement.loaded_model import load_model
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.settings import load_settings
stage("imports")
from cpu_kernels.compile_children import POOL
path, threads = sys.argv[1], int(sys.argv[2]) or None
settings = load_settings({"backend": "native", "threads": threads, "disk_cache": False})
begun = {
    "compiling kernels for this CPU, once": "header, kernels' declarations",
    "loading weights": "kernels",
}
def progress(what, share):
    if what == "loading weights" and what in begun:
        POOL.end_idle()  # only the time of children that have ended counts
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


def start(
    model: Path, threads: int, *, packed: bool = True, fills: bool = False, cold: bool = False
) -> dict[str, tuple[float, float]]:
    """Wall and processor seconds of each stage of one process. fills: wait until packed weights are written.

    cold: use an empty cache. `localllm run` itself is measured last, with nothing else running.
    """
    command = [sys.executable, "-c", CHILD, str(model), str(threads), *(["fill"] if fills else [])]
    given = [str(threads)] if threads else []
    run = [sys.executable, "-m", "localllm", "run", str(model), "Hi", "--max-tokens", "1", "--backend", "native"]
    run += ["--no-cache", *(["--threads", *given] if given else [])]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables |= {} if packed else {"LOCALLLM_PACKED_MIB": "0"}
    began = time.monotonic()
    with _cache(cold) as places:
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=variables | places).stdout
    spent = {}
    wall, processor = began, 0.0
    for name, at, used in json.loads(output):
        spent[name] = (at - wall, used - processor)
        wall, processor = at, used
    with _cache(cold) as places:
        spent[RUN] = _first_character(run, variables | places)
    return spent


@contextlib.contextmanager
def _cache(cold: bool) -> Iterator[dict[str, str]]:
    """Environment variables for an empty temporary cache if cold, else none."""
    with tempfile.TemporaryDirectory() as folder:
        yield {"XDG_CACHE_HOME": folder} if cold else {}


def _first_character(command: list[str], variables: dict[str, str]) -> tuple[float, float]:
    """Wall seconds until a process's first output, and processor seconds of it and its children until it ends."""
    began, before = time.monotonic(), os.times()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        wall = time.monotonic() - began
        process.stdout.read()
    after = os.times()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return wall, sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a file, or builtin")
    parser.add_argument("--threads", type=int, default=0, help="0 for all cores")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="with an empty cache of kernels")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model = builtin.path() if str(arguments.model) == "builtin" else arguments.model
    if not arguments.cold:
        start(model, arguments.threads, fills=True)
    rounds = [
        [start(model, arguments.threads, packed=packed, cold=arguments.cold) for packed in (True, False)]
        for _ in range(arguments.rounds)
    ]
    places = [(kind, column) for kind in (0, 1) for column in (0, 1)]
    rows = [
        (name, *(statistics.median(1000 * each[kind][name][column] for each in rounds) for kind, column in places))
        for name in rounds[0][0]
    ]
    totals = [
        statistics.median(
            1000 * sum(pair[column] for name, pair in each[kind].items() if name != RUN) for each in rounds
        )
        for kind, column in places
    ]
    rows.insert(-1, ("all", *totals))
    if arguments.json:
        sys.stdout.write(json.dumps([dict(zip(("stage", *NAMES), row, strict=True)) for row in rows]) + "\n")
    else:
        table(("stage", *NAMES), rows)


if __name__ == "__main__":
    main()
