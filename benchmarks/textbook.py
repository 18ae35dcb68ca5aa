"""Measures figures that textbooks and papers give for an inference engine, and shows them beside the published ones.

    textbook.py MODEL.gguf DRAFT.gguf TEXT.txt [--threads N] [--only ROW,...]

DRAFT has the same vocabulary as MODEL. Everything except the figure on speculation is measured without speculation.
Times depend on the machine; the expectations do not. ROW is the name of the function of this script that measures a
row of the table.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from benchmarks.engine_tools import GREEDY, KV_BYTES, Served, ask, medians, serve, table, text_tokens
from cpu_kernels.cores import usable_cores
from gguf_io import open_model
from localllm.engine.drafter import DraftModel
from localllm.engine.request import GenerationRequest
from localllm.engine.speculation import DraftLength, ModelDraftLength
from localllm.engine.step_costs import ChunkSize
from localllm.engine.stream import GenerationStream
from localllm.wings.lab.roofline.limits import LimitProbes
from models.native_runner import NativeRunner

GUESSES = 4
SLOTS = 8
Row = tuple[str, str, str, str]


def kv_waste(served: Served, tokens: Sequence[int]) -> Row:
    """Wasted KV memory, with pages and with the whole context reserved for every request."""
    lengths = [int(length) for length in np.random.default_rng(1).integers(20, len(tokens), 8)]
    runner = served.engine.runner
    before = runner.pages_free()
    for length in lengths:
        ask(served.engine, (tokens[length], *tokens[1:length]), 1)
    held = (before - runner.pages_free()) * runner.info.page_size
    paged, reserved = 1 - sum(lengths) / held, 1 - sum(lengths) / (len(lengths) * served.engine.context)
    return (
        "KV memory wasted, pages against reserving the context",
        "< 4 % against 60-80 %",
        f"{paged:.1%}",
        f"{reserved:.0%}",
    )


def kv_size(model: Path, served: Served) -> Row:
    """KV bytes per token against the formula."""
    with open_model(model) as file:
        name, data = file.architecture, file.metadata
        heads = data.get_int(f"{name}.attention.head_count_kv")
        size = data.get_int(f"{name}.embedding_length") // data.get_int(f"{name}.attention.head_count")
        size = data.get_int(f"{name}.attention.key_length", size)
        formula = 2 * data.get_int(f"{name}.block_count") * heads * size * 2
    measured = served.engine.runner.info.kv_bytes_per_token
    return (
        "KV bytes a token",
        f"2 x layers x KV heads x head size x 2 = {formula}",
        str(measured),
        "heads padded to whole vectors",
    )


def batching(model: Path, tokens: Sequence[int], threads: int | None) -> Row:
    """Total tokens per second of 32 requests: one at a time, in static batches of SLOTS, and continuously batched."""
    answers = [int(length) for length in np.random.default_rng(2).geometric(1 / 24, 32).clip(2, 120)]
    served = serve(model, threads, max_running=SLOTS)

    def submit(at: int) -> GenerationStream:
        prompt = (tokens[at], *tokens[50 + 7 * at : 66 + 7 * at])
        return served.engine.submit(GenerationRequest(prompt, GREEDY, max_tokens=answers[at], ignore_eos=True))

    def run(group: int) -> float:
        began = time.monotonic()
        for first in range(0, len(answers), group):
            for stream in [submit(at) for at in range(first, min(first + group, len(answers)))]:
                stream.collect()
        return sum(answers) / (time.monotonic() - began)

    ways: dict[str, Callable[[], float]] = {
        "single": lambda: run(1),
        "static": lambda: run(SLOTS),
        "continuous": lambda: run(len(answers)),
    }
    single, static, continuous = medians(3, ways).values()
    served.engine.close()
    label = f"total tok/s, {SLOTS} at once: continuous against one at a time, and against static batches"
    measured = f"{continuous / single:.1f} and {continuous / static:.2f} times"
    return label, "2-23 times", measured, f"{single:.0f}, {static:.0f}, {continuous:.0f} tok/s"


def cached_prefix(served: Served, tokens: Sequence[int], cached: int, new: int) -> Row:
    """TTFT with most of the prompt cached, against nothing cached."""
    cold, warm = [], []
    for at in range(3):
        prefix = (tokens[at], *tokens[1:cached])
        cold.append(ask(served.engine, (tokens[at + 9], *prefix[1:], *tokens[:new]), 1).timings.ttft_s)
        ask(served.engine, prefix, 1)
        warm.append(ask(served.engine, (*prefix, *tokens[3 : 3 + new]), 1).timings.ttft_s)
    saved = 1 - statistics.median(warm) / statistics.median(cold)
    share = cached / (cached + new)
    label = f"TTFT with {cached} tokens cached and {new} new, against none cached"
    # Every new token attends to all before it, so a larger share of attention's work remains than of the tokens.
    expected = f"-{share:.0%} by tokens, -{share * share:.1%} by attention"
    return label, expected, f"-{saved:.0%}", f"{1e3 * statistics.median(warm):.0f} ms"


def speculation(model: Path, draft: Path, tokens: Sequence[int], threads: int | None) -> Row:
    """Tokens per round with a draft model that always drafts GUESSES tokens, against the formula."""
    with open_model(draft) as file:
        guesser = DraftModel(NativeRunner(file, kv_bytes=KV_BYTES, threads=threads))
    choose, observe = DraftLength.choose, ModelDraftLength.observe
    served = serve(model, threads, drafter=guesser)
    rounds: list[tuple[int, int]] = []

    def note(length: ModelDraftLength, probabilities: Sequence[float], accepted: int) -> None:
        rounds.append((len(probabilities), accepted))

    DraftLength.choose = lambda _self, limit, *_: GUESSES if limit >= GUESSES else 0  # type: ignore[method-assign]
    ModelDraftLength.observe = note  # type: ignore[method-assign]
    try:
        for at in range(6):
            ask(served.engine, tokens[at * 40 : at * 40 + 24], 120)
    finally:
        DraftLength.choose, ModelDraftLength.observe = choose, observe  # type: ignore[method-assign]
        served.engine.close()
    full = [accepted for drafted, accepted in rounds if drafted == GUESSES]
    tried = sum(min(accepted + 1, GUESSES) for accepted in full)
    rate = sum(full) / tried
    expected = sum(rate**power for power in range(GUESSES + 1))  # the formula as a sum, which also works for a = 1
    label = f"tokens a round, {GUESSES} guesses, acceptance {rate:.2f}"
    return (
        label,
        f"(1 - a^{GUESSES + 1}) / (1 - a) = {expected:.2f}",
        f"{1 + statistics.mean(full):.2f}",
        f"{len(full)} rounds",
    )


def bandwidth(model: Path, served: Served, tokens: Sequence[int], threads: int | None) -> Row:
    """Decode speed against reading the file once per token with the same number of threads; alternating, medians."""
    probes = LimitProbes(threads or usable_cores(), time.perf_counter)
    speeds = []
    for _ in range(5):
        probes.sample()
        speeds.append(47 / ask(served.engine, tokens[:8], 48).timings.decode_s)
    read, decode = probes.limits().read.median, statistics.median(speeds)
    probes.close()
    bound = read / model.stat().st_size
    label = "decode against bandwidth / bytes of the file"
    return (
        label,
        f"at most {bound:.1f} tok/s at {read / 1e9:.1f} GB/s",
        f"{decode:.1f} tok/s",
        f"{decode / bound:.0%}",
    )


def chunked_prefill(served: Served, tokens: Sequence[int], long: int) -> Row:
    """TTFT of a short request that arrives during a long prefill, with chunks and with the largest possible steps.

    A chunk's time is the median of the steps from the arrival to the short request's first token.
    """

    def measure(first_id: int) -> tuple[float, float]:
        waits, chunks = [], []
        for at in range(5):
            prompt = (first_id + at, *tokens[1:long])
            first = served.engine.submit(GenerationRequest(prompt, GREEDY, max_tokens=1))
            while not any(event.progress and event.progress.prefilled for event in first.poll()):
                time.sleep(0.001)
            time.sleep(0.05 * at)
            before = served.engine.inspect().result().steps[-1]
            waits.append(ask(served.engine, (first_id + 9 + at, *tokens[5:20]), 1).timings.ttft_s)
            since = takewhile(
                lambda step, before=before: step is not before, reversed(served.engine.inspect().result().steps)
            )
            chunks.append(statistics.median(step.seconds for step in since))
            first.cancel()
            first.collect()
        return statistics.median(waits), statistics.median(
            wait / chunk for wait, chunk in zip(waits, chunks, strict=True)
        )

    with_chunks, times = measure(300)
    targets, ChunkSize.TARGET_S, ChunkSize.ALONE_S = (ChunkSize.TARGET_S, ChunkSize.ALONE_S), 1e9, 1e9
    without, _ = measure(330)
    ChunkSize.TARGET_S, ChunkSize.ALONE_S = targets
    label = f"TTFT of a short request during a prefill of {long} tokens, chunked against not"
    measured = f"{1e3 * with_chunks:.0f} against {1e3 * without:.0f} ms"
    return label, "at most 3 chunks' times", measured, f"{times:.1f} chunks' times"


def cancelled_prefill(served: Served, tokens: Sequence[int], long: int) -> Row:
    """How long a request continues after it is cancelled during its prefill."""
    waits = []
    for at in range(5):
        stream = served.engine.submit(GenerationRequest((tokens[long + at], *tokens[1:long]), GREEDY, max_tokens=1))
        while not any(event.progress and event.progress.prefilled for event in stream.poll()):
            time.sleep(0.001)
        began = time.monotonic()
        stream.cancel()
        stream.collect()
        waits.append(time.monotonic() - began)
    label = f"end of a request that is cancelled during a prefill of {long} tokens"
    return (
        label,
        "at most 250 ms on 1.1B",
        f"{1e3 * statistics.median(waits):.0f} ms",
        f"{1e3 * max(waits):.0f} at most",
    )


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", type=lambda names: names.split(","), help="rows to measure, all if left out")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    choose, DraftLength.choose = DraftLength.choose, lambda *_: 0  # type: ignore[method-assign, assignment]
    served = serve(arguments.model, arguments.threads, max_running=16)
    context = served.engine.context
    tokens = text_tokens(served.tokenizer, text, 4096)
    ask(served.engine, tokens[:64], 8)
    cached = min(2000, context * 3 // 4)
    measures: dict[str, Callable[[], Row]] = {
        "kv_waste": lambda: kv_waste(served, tokens[: min(context, 1024)]),
        "kv_size": lambda: kv_size(arguments.model, served),
        "batching": lambda: batching(arguments.model, tokens, arguments.threads),
        "cached_prefix": lambda: cached_prefix(served, tokens, cached, max(cached // 25, 4)),
        "bandwidth": lambda: bandwidth(arguments.model, served, tokens, arguments.threads),
        "chunked_prefill": lambda: chunked_prefill(served, tokens, min(context - 8, 4000)),
        "cancelled_prefill": lambda: cancelled_prefill(served, tokens, min(context - 8, 3000)),
    }
    wanted = arguments.only or [*measures, "speculation"]
    rows = [measures[name]() for name in measures if name in wanted]
    served.engine.close()
    DraftLength.choose = choose  # type: ignore[method-assign]
    if "speculation" in wanted:
        rows.append(speculation(arguments.model, arguments.draft, tokens, arguments.threads))
    if not rows:
        parser.error(f"--only names none of {', '.join([*measures, 'speculation'])}")
    table(("what", "expected", "measured", ""), rows)


if __name__ == "__main__":
    main()
