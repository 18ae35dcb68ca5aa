"""Models with sliding windows: truncated, shared and restored far beyond the window."""

from dataclasses import replace
from pathlib import Path

import pytest

from gguf_io.model_file import open_model
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.placement.backends import LLAMA_SEQUENCES
from tests.gpu_offload import sparse_models
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]

PROMPT = [(7 * position * position + 3) % 290 + 5 for position in range(100)]
SAME = llama_oracle.Setup(flash_attention=True)
OPTIONS = LlamaOptions(context_tokens=512, max_sequences=3, gpu_layers=0, threads=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return sparse_models.write(sparse_models.TINY_GEMMA3, tmp_path_factory.mktemp("models") / "gemma.gguf", seed=3)


@pytest.fixture
def runner(path, open_runner) -> LlamaCppRunner:
    return open_runner(path, OPTIONS)


def prefilled(runner: LlamaCppRunner, tokens: list[int]) -> int:
    sequence = runner.create_sequence()
    runner.run(tokens, range(len(tokens)), [sequence] * len(tokens), [])
    return sequence


def continued(runner: LlamaCppRunner, sequence: int, token: int, count: int = 12) -> list[int]:
    tokens = [token]
    while len(tokens) <= count:
        position = runner.sequence_length(sequence)
        tokens.append(int(runner.run(tokens[-1:], [position], [sequence], [0]).argmax()))
    return tokens[1:]


@pytest.mark.parametrize("length", [1, 15, 30, 99])
def test_cut_and_shared_far_behind_the_window(runner, path, length):
    expected = llama_oracle.greedy(path, [*PROMPT[:length], 9], 12, SAME)
    sequence = prefilled(runner, PROMPT)
    fork = runner.fork_sequence(sequence, length)
    runner.truncate_sequence(sequence, length)
    assert continued(runner, sequence, 9) == expected
    assert continued(runner, fork, 9) == expected


def test_restored_piece_by_piece(runner, path):
    source = prefilled(runner, PROMPT)
    pieces = [(start, min(start + 40, 100)) for start in range(0, 100, 40)]
    saved = [(start, stop, runner.export_kv(source, start, stop)) for start, stop in pieces]
    target = runner.create_sequence()
    for start, stop, data in saved:
        runner.import_kv(target, start, stop, data)
    assert continued(runner, target, 9) == llama_oracle.greedy(path, [*PROMPT, 9], 12, SAME)
    runner.truncate_sequence(target, 50)
    assert continued(runner, target, 9) == llama_oracle.greedy(path, [*PROMPT[:50], 9], 12, SAME)


def test_a_damaged_end_leaves_the_sequence_as_it_was(runner, path):
    source = prefilled(runner, PROMPT)
    target = runner.fork_sequence(source, 30)
    with pytest.raises(ValueError, match="not KV of positions"):
        runner.import_kv(target, 30, 100, runner.export_kv(source, 30, 100)[:-1])
    assert runner.sequence_length(target) == 30
    assert continued(runner, target, 9) == llama_oracle.greedy(path, [*PROMPT[:30], 9], 12, SAME)


def test_what_has_left_the_window_is_not_overwritten(runner, path):
    """llama.cpp treats such cells as free when a prompt reaches them, although the cache keeps all positions."""
    first, kept = prefilled(runner, PROMPT), prefilled(runner, PROMPT)
    runner.free_sequence(first)
    prefilled(runner, PROMPT * 2)  # fills the hole before the kept prefix, and continues
    assert continued(runner, runner.fork_sequence(kept, 50), 9) == llama_oracle.greedy(
        path, [*PROMPT[:50], 9], 12, SAME
    )


def test_windows_leave_numbers_for_half_the_sequences(path):
    with open_model(path) as model, pytest.raises(ValueError, match="max_sequences is 128"):
        LlamaCppRunner(model, replace(OPTIONS, max_sequences=128))


def test_the_engines_number_of_sequences_and_more_open(path):
    """Twice as many in llama.cpp: it aborts if it may return fewer rows of logits than there are sequences."""
    for sequences in (LLAMA_SEQUENCES, 127):
        with open_model(path) as model:
            LlamaCppRunner(model, replace(OPTIONS, max_sequences=sequences, batch_rows=16)).close()
