"""Perplexity of a text, and divergence from a reference model, in the chunks of llama.cpp's perplexity tool.

The text is cut into chunks of `context` tokens. The first token of each is replaced by BOS if the model uses one; the
first half is only context, and the predictions of the second half count (tools/perplexity/perplexity.cpp). So the
figures are comparable.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.engine.runner import Runner
from localllm.errors import RequestError

Progress = Callable[[int, int], None]
"""Called with the number of chunks done and their total."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log likelihood; uncertainty is one standard error, by error propagation."""

    value: float
    uncertainty: float
    tokens: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """Kullback-Leibler divergence of the model's predictions from the reference's, in nats per token.

    same_top: the share of predictions whose likeliest token is the reference's. reference: its perplexity.
    """

    mean: float
    uncertainty: float
    median: float
    percentile_99: float
    maximum: float
    same_top: float
    reference: Perplexity


def split_chunks(tokens: Sequence[int], context: int, bos: int | None) -> list[list[int]]:
    """Whole chunks of the text; bos replaces the first token of each. Raises RequestError if there are none."""
    count = len(tokens) // context
    if count == 0:
        raise RequestError(
            f"The text has {len(tokens)} tokens, less than one chunk of {context}. "
            "Give a longer text, or a smaller --ctx."
        )
    chunks = [list(tokens[start : start + context]) for start in range(0, count * context, context)]
    if bos is not None:
        for chunk in chunks:
            chunk[0] = bos
    return chunks


def perplexity(runner: Runner, chunks: Sequence[Sequence[int]], progress: Progress) -> Perplexity:
    """Measure one model. Uses one sequence of the runner at a time."""
    losses = []
    for done, chunk in enumerate(chunks):
        progress(done, len(chunks))
        losses.append(_losses(log_probabilities(runner, chunk), chunk))
    return _summary(np.concatenate(losses), len(chunks))


def divergence(
    runner: Runner, reference: Runner, chunks: Sequence[Sequence[int]], progress: Progress
) -> tuple[Perplexity, Divergence]:
    """Measure a model beside its reference, chunk by chunk. Both must have the same vocabulary; RequestError if not."""
    if runner.info.vocab_size != reference.info.vocab_size:
        raise RequestError(
            f"The model has {runner.info.vocab_size} tokens and the reference {reference.info.vocab_size}: "
            "they cannot be compared."
        )
    losses, reference_losses, divergences, same = [], [], [], []
    for done, chunk in enumerate(chunks):
        progress(done, len(chunks))
        ours, theirs = log_probabilities(runner, chunk), log_probabilities(reference, chunk)
        losses.append(_losses(ours, chunk))
        reference_losses.append(_losses(theirs, chunk))
        divergences.append(np.sum(np.exp(theirs) * (theirs - ours), axis=1))
        same.append(ours.argmax(axis=1) == theirs.argmax(axis=1))
    found = np.concatenate(divergences)
    return _summary(np.concatenate(losses), len(chunks)), Divergence(
        mean=float(found.mean()),
        uncertainty=_standard_error(found),
        median=float(np.median(found)),
        percentile_99=float(np.quantile(found, 0.99)),
        maximum=float(found.max()),
        same_top=float(np.concatenate(same).mean()),
        reference=_summary(np.concatenate(reference_losses), len(chunks)),
    )


def log_probabilities(runner: Runner, chunk: Sequence[int], first: int | None = None) -> NDArray[np.float64]:
    """Log probabilities of all tokens after each position from `first` (that of the second half) on but the last.

    float64[len(chunk) - 1 - first, vocab_size].
    """
    sequence = runner.create_sequence()
    try:
        return np.concatenate(list(_predictions(runner, sequence, chunk, len(chunk) // 2 if first is None else first)))
    finally:
        runner.free_sequence(sequence)


def _predictions(runner: Runner, sequence: int, chunk: Sequence[int], first: int) -> Iterator[NDArray[np.float64]]:
    for start in range(0, len(chunk), runner.info.max_rows):
        rows = chunk[start : start + runner.info.max_rows]
        positions = range(start, start + len(rows))
        wanted = [row for row, position in enumerate(positions) if first <= position < len(chunk) - 1]
        logits = runner.run(rows, positions, [sequence] * len(rows), wanted)
        if wanted:
            yield _log_softmax(logits.astype(np.float64))


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _losses(predictions: NDArray[np.float64], chunk: Sequence[int]) -> NDArray[np.float64]:
    following = np.array(chunk[len(chunk) // 2 + 1 :])
    losses: NDArray[np.float64] = -predictions[np.arange(len(following)), following]
    return losses


def _summary(losses: NDArray[np.float64], chunks: int) -> Perplexity:
    value = math.exp(losses.mean())
    return Perplexity(value, value * _standard_error(losses), len(losses), chunks)


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std() / math.sqrt(len(values) - 1)) if len(values) > 1 else math.inf
