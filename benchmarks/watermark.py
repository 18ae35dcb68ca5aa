"""How many marked and unmarked texts `localllm detect` recognises, and what a watermark costs per token.

python -m benchmarks.watermark [MODEL ...]
"""

import argparse
import sys
import time

import numpy as np

from gguf_io import ModelFile, load_tokenizer, open_model
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.sampling import Sampler
from localllm.front.pulling import obtain
from localllm.placement.backends import open_runner
from localllm.placement.loaded_model import LoadedModel, load_model
from localllm.settings import Settings
from localllm.wings.lab.quality.watermark import CONTEXT, Detection, detect

BEGINNINGS = (
    "Once upon a time",
    "The history of the city",
    "One day a little girl named Lily",
    "In the garden there was",
    "The most important thing about science is",
)


def cost_ms(words: int, marked: bool) -> float:
    """The least processor time to sample a token."""
    logits = np.random.default_rng(0).standard_normal(words).astype(np.float32)
    sampler = Sampler(SamplingParams(seed=1, watermark_key="key" if marked else None), words, [1])
    best = float("inf")
    for _ in range(20):
        begin = time.process_time()
        for token in range(50):
            sampler.sample(logits)
            sampler.accept(token)
        best = min(best, (time.process_time() - begin) / 50 * 1000)
    return best


def texts(model: LoadedModel, count: int, tokens: int, marked: bool) -> list[str]:
    """Continuations of some beginnings, with the default sampling."""
    before = [model.tokenizer.bos_id] if model.tokenizer.add_bos and model.tokenizer.bos_id is not None else []
    streams = [
        model.engine.submit(
            GenerationRequest(
                (*before, *model.tokenizer.encode(BEGINNINGS[number % len(BEGINNINGS)])),
                SamplingParams(seed=number, watermark_key=_key(number) if marked else None),
                max_tokens=tokens,
                ignore_eos=True,
                persist=False,
            )
        )
        for number in range(count)
    ]
    return ["".join(event.text for event in stream) for stream in streams]


def found(file: ModelFile, written: list[str]) -> list[Detection]:
    """What each text's key finds in it."""
    tokenizer, defaults = load_tokenizer(file), SamplingParams()
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    runner, _ = open_runner(file, Settings(), kv_tokens=2 * CONTEXT)
    marks = [(_key(number), defaults.watermark_delta, defaults.watermark_gamma) for number in range(len(written))]
    seen = [
        detect(runner, tokenizer.encode(text), bos, mark, lambda *_: None)
        for text, mark in zip(written, marks, strict=True)
    ]
    runner.close()
    return seen


def _key(number: int) -> str:
    """Keys differ: which names are green in a story, say, depends on the key."""
    return f"key {number}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["builtin"])
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    for words in (32_000, 151_936, 262_144):
        plain, marked = cost_ms(words, False), cost_ms(words, True)
        sys.stdout.write(
            f"{words:,} words: {plain:.3f} ms a token, with a watermark {marked:.3f}, {marked - plain:.3f} more\n"
        )
    for name in given.models:
        settings = Settings()
        path = obtain(name, settings).path
        for marked in (True, False):
            with load_model(path, settings) as model:
                written = texts(model, given.texts, given.tokens, marked)
            with open_model(path) as file:
                seen = found(file, written)
            called, z = sum(bool(one.marked) for one in seen), np.median([one.z for one in seen])
            sys.stdout.write(
                f"{name}, {given.texts} {'marked' if marked else 'unmarked'} texts of {given.tokens} tokens: "
                f"{called} called marked, median z {z:.1f}\n"
            )


if __name__ == "__main__":
    main()
