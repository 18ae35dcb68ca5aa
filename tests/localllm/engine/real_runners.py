"""Both real runners on one tiny model, with counters, and a check of greedy answers that allows for rounding."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gguf_io import ModelFile
from gguf_io.runner_info import AdapterSet
from localllm.engine.engine import Engine
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.engine.runner import Runner
from localllm.engine.stream import Completion
from tests.oracle import llama_oracle

KINDS = [pytest.param("llama", marks=[pytest.mark.oracle, llama_oracle.needs_llama]), "native"]

# How far a greedy token's logit may be below the best. The native engine is exact; llama.cpp's last bits depend on the
# batch.
TOLERANCE = {"native": 0.0, "llama": 0.05}


class WatchedRunner:
    """A real runner that counts rows and sequences; everything else is passed on."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.rows_computed = 0
        self.batches: list[int] = []
        self.alive: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def create_sequence(self, adapters: AdapterSet = ()) -> int:
        sequence = self.runner.create_sequence(adapters)
        self.alive.add(sequence)
        return sequence

    def fork_sequence(self, source: int, length: int) -> int:
        sequence = self.runner.fork_sequence(source, length)
        self.alive.add(sequence)
        return sequence

    def free_sequence(self, sequence: int) -> None:
        self.runner.free_sequence(sequence)
        self.alive.remove(sequence)

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        self.rows_computed += len(tokens)
        self.batches.append(len(tokens))
        return self.runner.run(tokens, positions, sequences, wanted)

    def run_unless(self, stop: threading.Event, *rows: Any) -> NDArray[np.float32] | None:
        logits = self.runner.run_unless(stop, *rows)  # type: ignore[attr-defined]
        if logits is not None:
            self.rows_computed += len(rows[0])
            self.batches.append(len(rows[0]))
        return logits  # type: ignore[no-any-return]

    def check_integrity(self, owned: set[int]) -> None:
        """Raise unless exactly these sequences exist, and no page is lost."""
        if self.alive != owned:
            raise RuntimeError(f"sequences alive {self.alive}, owned {owned}")
        stored = sum(self.runner.sequence_length(sequence) for sequence in self.alive)
        taken = self.runner.info.pages_total - self.runner.pages_free()
        slack = len(self.alive) * self.runner.info.page_size
        if taken * self.runner.info.page_size > stored + slack:
            raise RuntimeError(f"{taken} pages are taken by {stored} tokens")
        holders = self.runner.page_holders()
        held = sum(-(-self.runner.sequence_length(sequence) // self.runner.info.page_size) for sequence in self.alive)
        if (int((holders > 0).sum()), int(holders.sum())) != (taken, held):
            raise RuntimeError(f"{taken} pages are taken and held {held} times, but counted {holders.tolist()}")
        self.runner.check_integrity(owned)


def open_real(kind: str, model: ModelFile, *, tokens: int = 2048) -> Runner:
    """A runner with room for about this many tokens (llama.cpp's cells come in multiples of 256)."""
    if kind == "llama":
        from gpu_offload.options import LlamaOptions
        from gpu_offload.runner import LlamaCppRunner

        return LlamaCppRunner(model, LlamaOptions(context_tokens=tokens, max_sequences=24, gpu_layers=0, threads=1))
    from models.config import read_config
    from models.kv_layout import bytes_of_tokens, stored_types
    from models.native_runner import NativeRunner

    config = read_config(model)
    return NativeRunner(
        model, kv_bytes=bytes_of_tokens(config, stored_types(config, ("f16", "f16")), tokens), threads=1
    )


def answer(engine: Engine, tokens: Sequence[int], most: int = 30, shared_prefix: int = 0) -> Completion:
    """A greedy answer of an engine without a thread, whose integrity is checked after each step."""
    request = GenerationRequest(
        tuple(tokens), sampling=SamplingParams(temperature=0), max_tokens=most, shared_prefix=shared_prefix
    )
    stream = engine.submit(request)
    while engine.step():
        engine.check_integrity()
    return stream.collect()


def is_greedy(runner: Runner, prompt: Sequence[int], given: Sequence[int]) -> bool:
    """Whether an answer has the best tokens, recomputed from scratch by a runner of the same model."""
    tokens, sequence = [*prompt, *given[:-1]], runner.create_sequence()
    edges = [*range(0, len(prompt) - 1, runner.info.max_rows), len(prompt) - 1, len(tokens)]
    for start, stop in pairwise(edges):
        wanted = range(stop - start) if stop == len(tokens) else ()
        logits = runner.run(tokens[start:stop], range(start, stop), [sequence] * (stop - start), wanted)
    runner.free_sequence(sequence)
    return bool((logits.argmax(axis=1) == list(given)).all())


Check = Callable[[Sequence[int], Sequence[int]], None]


@contextmanager
def greedy_check(kind: str, model: ModelFile) -> Iterator[Check]:
    """A function that raises unless an answer is greedy: recomputed in one pass, with nothing shared."""
    reference = open_real(kind, model, tokens=1024)

    def check(prompt: Sequence[int], answer: Sequence[int]) -> None:
        if not answer:
            return
        tokens = [*prompt, *answer[:-1]]
        sequence = reference.create_sequence()
        logits = reference.run(
            tokens, range(len(tokens)), [sequence] * len(tokens), range(len(prompt) - 1, len(tokens))
        )
        chosen = logits[np.arange(len(answer)), list(answer)]
        below = logits.max(axis=1) - chosen
        reference.free_sequence(sequence)
        assert (below <= TOLERANCE[kind]).all(), f"token {int(below.argmax())} is {below.max()} below the best"

    try:
        yield check
    finally:
        reference.close()
