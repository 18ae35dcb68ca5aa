"""Speed of a model with a trained draft head against the same model without, on text that it really writes.

    trained_drafts.py HEAD.gguf [--model MODEL.gguf] [--rounds 5] [--threads N] [--temperature T] [--processor-time]

The built-in model, or another one, writes stories. Texts with and without the head must be the same; on and off
alternate in one run; medians. Prompt lookup drafts in both. --processor-time measures processor time, for machines that
others use too; with one thread only.
"""

import argparse
import statistics
import sys
from pathlib import Path

from benchmarks.engine_tools import KV_BYTES, chosen_clock, table
from gguf_io import load_tokenizer, open_model
from localllm.engine.drafter import SelfDrafter
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.stream import Completion
from models.builtin import path as built_in
from models.native_runner import NativeRunner

SUBJECTS = ("a brave fox", "the moon", "a robot who is lonely", "two old friends", "a lost key", "a dragon", "the sea")
CHAT = "<|im_start|>user\nTell me a story about {}.<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--model", type=Path, default=built_in())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--processor-time", action="store_true")
    arguments = parser.parse_args()
    clock = chosen_clock(parser, arguments)
    engines: dict[str, Engine] = {}
    with open_model(arguments.model) as file, open_model(arguments.head) as head:
        tokenizer = load_tokenizer(file)
        for name, drafts in (("on", head), ("off", False)):
            runner = NativeRunner(file, kv_bytes=KV_BYTES // 8, threads=arguments.threads, drafts=drafts)
            drafter = SelfDrafter(runner, clock) if drafts else None
            engines[name] = Engine(runner, tokenizer, drafter=drafter, clock=clock)
            engines[name].start()
    sampling = SamplingParams(temperature=arguments.temperature, seed=1)
    prompts = [tuple(tokenizer.encode(CHAT.format(one), parse_special=True)) for one in SUBJECTS]
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    said: dict[str, list[Completion]] = {}
    for at in range(arguments.rounds + 1):
        for name, engine in engines.items():
            said[name] = done = [engine.submit(GenerationRequest(one, sampling, 200)).collect() for one in prompts]
            seconds = sum(each.last.timings.decode_s for each in done)
            if at:
                speeds[name].append(sum(each.last.counts.generated - 1 for each in done) / seconds)
    for engine in engines.values():
        engine.close()
    if [each.token_ids for each in said["on"]] != [each.token_ids for each in said["off"]]:
        raise SystemExit("the texts differ")
    on, off = (statistics.median(speeds[name]) for name in ("on", "off"))
    tokens, drafted, accepted = (
        sum(getattr(each.last.counts, name) for each in said["on"]) for name in ("generated", "drafted", "accepted")
    )
    rows = [[off, on, on / off, tokens, drafted, accepted / max(drafted, 1)]]
    table(("off tok/s", "on tok/s", "times", "tokens", "drafted", "accepted"), rows)
    sys.stdout.write("The texts are the same.\n")


if __name__ == "__main__":
    main()
