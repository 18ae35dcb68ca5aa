"""A small model on the llama.cpp runner whose sequences rest and are parked: what its tests share."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from gguf_io.model_file import open_model
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner

OPTIONS = LlamaOptions(context_tokens=512, max_sequences=5, gpu_layers=0, threads=1)


def opened(path: Path, **wishes: object) -> LlamaCppRunner:
    with open_model(path) as model:
        return LlamaCppRunner(model, replace(OPTIONS, **wishes))  # type: ignore[arg-type]


def append(runner: LlamaCppRunner, sequence: int, tokens: list[int]) -> np.ndarray:
    start, count = runner.sequence_length(sequence), len(tokens)
    logits = runner.run(tokens, range(start, start + count), [sequence] * count, [count - 1]).copy()
    runner.check_parked()
    return logits[0]


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, atol=0.05)  # llama.cpp rounds by what is computed together: 0.027 seen
