"""Decodes a model that does not fit into memory, and the same with enough memory, and compares speed and logits.

    from_disk.py MODEL.gguf --memory MIB [--tokens 150] [--distinct 6] [--rounds 3]

Needs Linux with control groups of version 1 and the right to create one. The model is loaded within a generous limit;
then the limit, which covers the process and its file pages, is lowered to MIB, and random tokens are decoded. In a
mixture of experts, few distinct tokens select few experts, as real texts do; --distinct 0 makes all tokens distinct,
the worst case for routing. The model's packed weights must be on disk: load it once before.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.engine_tools import table
from gguf_io import open_model
from localllm.packed import packed_files
from models.needs import native_needs

GROUPS = Path("/sys/fs/cgroup/memory")
CHILD = """
import json, os, random, statistics, sys, time, zlib
from pathlib import Path
from gguf_io import open_model
from localllm.placement.backends import open_runner
from localllm.settings import Settings
model, tokens, distinct, group, roomy, limit = sys.argv[1], *map(int, sys.argv[2:4]), Path(sys.argv[4]), *sys.argv[5:]
if int(limit):
    (group / "memory.limit_in_bytes").write_text(roomy)
    (group / "cgroup.procs").write_text("0")
with open_model(model) as file:
    settings = Settings(backend="native", kv_mib=64, ctx=2048, from_disk=True)
    runner, choice = open_runner(file, settings, None)
if int(limit):
    (group / "memory.limit_in_bytes").write_text(limit)
dice = random.Random(1)
pool = [dice.randrange(3, 300) for _ in range(distinct or tokens)]
sequence, times, digest = runner.create_sequence(), [], 0
for position in range(tokens):
    began = time.perf_counter()
    logits = runner.run([dice.choice(pool) if distinct else pool[position]], [position], [sequence], [0])
    times.append(time.perf_counter() - began)
    digest = zlib.crc32(logits.tobytes(), digest)
half = times[tokens // 3 :]
found = [1000 * statistics.median(half), 1000 * statistics.mean(half), digest, choice.notes]
print(json.dumps(found), flush=True)
os._exit(0)
"""


def forget_pages() -> None:
    """Drop packed files from the page cache, so that the group that reads them next is charged for them."""
    for each in packed_files():
        with open(each.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", type=int, required=True, help="MiB of the process and its pages of files")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--distinct", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with open_model(arguments.model) as file:
        weights = native_needs(file).weights
    group = GROUPS / f"localllm-from-disk-{os.getpid()}"
    group.mkdir()
    roomy = weights // 2 + (1 << 30)
    rows, digests = [], set()
    try:
        for _ in range(arguments.rounds):
            for limit in (0, arguments.memory << 20):
                forget_pages()
                words = (arguments.model, arguments.tokens, arguments.distinct, group, roomy, limit)
                command = [sys.executable, "-c", CHILD, *map(str, words)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                median, mean, digest, notes = json.loads(done.stdout)
                rows.append(("whole" if limit == 0 else f"{arguments.memory} MiB", median, mean, "; ".join(notes)))
                digests.add(digest)
    finally:
        group.rmdir()
    table(("memory", "median ms/token", "mean ms/token", "the load said"), rows)
    sys.stdout.write(f"weights: {weights >> 20} MiB; logits {'equal' if len(digests) == 1 else 'DIFFER'}\n")


if __name__ == "__main__":
    main()
