"""Infinities and NaN in one sequence's KV do not affect other sequences, wherever pages are shared or reused."""

from pathlib import Path

import numpy as np
import pytest

from gguf_io import open_model
from models.native_runner import NativeRunner
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write

TOKENS = [5, 17, 3, 250, 99, 7, 8, 9, 10, 11, 12, 13]
CUT = 5


def poisoned(data: bytes, position: int, value: float) -> bytes:
    """Exported KV of less than a page, of heads of 64, in which one position's factors have this value."""
    heads = np.frombuffer(data, np.float32).copy().reshape(-1, 64 * 16 // 2 + 16)  # words in pairs, then factors
    heads[:, 64 * 16 // 2 + position] = value
    return heads.tobytes()


def append(runner: NativeRunner, sequence: int, tokens: list[int]) -> np.ndarray:
    start = runner.sequence_length(sequence)
    rows = range(start, start + len(tokens))
    return runner.run(tokens, rows, [sequence] * len(tokens), [len(tokens) - 1]).copy()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("how", ["cut", "fork", "fork of a fork", "cut twice", "freed"])
def test_values_after_a_truncation_reach_no_sequence(how: str, value: float, tmp_path: Path) -> None:
    with open_model(write(MODELS["llama"], tmp_path / "llama.gguf")) as file:
        runner = NativeRunner(file, kv_bytes=1 << 20, threads=1)
    try:
        clean = runner.create_sequence()
        append(runner, clean, TOKENS[:CUT])
        expected = append(runner, clean, [42])
        donor = runner.create_sequence()
        append(runner, donor, TOKENS)
        data = poisoned(runner.export_kv(donor, 0, len(TOKENS)), CUT + 3, value)
        runner.truncate_sequence(donor, 0)
        runner.import_kv(donor, 0, len(TOKENS), data)
        if how == "cut":
            runner.truncate_sequence(donor, CUT)
            victim = donor
        elif how == "fork":
            victim = runner.fork_sequence(donor, CUT)
        elif how == "fork of a fork":
            runner.truncate_sequence(donor, CUT + 1)
            victim = runner.fork_sequence(runner.fork_sequence(donor, CUT + 1), CUT)
        elif how == "cut twice":
            runner.truncate_sequence(donor, CUT + 5)
            runner.truncate_sequence(donor, CUT)
            victim = donor
        else:
            runner.free_sequence(donor)
            victim = runner.create_sequence()
            append(runner, victim, TOKENS[:CUT])
        assert np.array_equal(append(runner, victim, [42]), expected)
        runner.check_integrity(set(runner.sequences))
    finally:
        runner.close()
