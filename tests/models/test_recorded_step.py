"""Inspecting a step afterwards: what it reads and computes agrees with the file, and repeating it changes nothing."""

from itertools import count
from pathlib import Path

import numpy as np
import pytest

from cpu_kernels.recorded_step import OperationKind
from gguf_io import open_model
from models.native_runner import NativeRunner
from models.weights import padded
from tests.models.architecture_models import MODELS
from tests.models.state_checks import opened
from tests.models.synthetic import write
from tests.models.test_determinism import extend, tokens_of


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_products_and_profile(name: str, tmp_path: Path) -> None:
    shape = MODELS[name]
    with open_model(write(shape, tmp_path / f"{name}.gguf")) as file:
        runner = NativeRunner(file, kv_bytes=1 << 20, threads=2)
        used = int(shape.extra.get("expert_used_count", 0))
        multiply_adds = {"row": 0, "logits": 0}
        for tensor, info in file.tensors.items():
            if len(info.shape) < 2 or (tensor == "token_embd.weight" and not shape.tied):
                continue
            of = "logits" if tensor in ("output.weight", "token_embd.weight") else "row"
            rows, k = info.shape[-2:]
            multiply_adds[of] += padded(rows) * k * (used if len(info.shape) == 3 else 1)
    try:
        sequence = runner.create_sequence()
        logits = runner.run([5], [0], [sequence], [0]).copy()
        step = runner.last_step()
        row, last = step.products()
        assert (row.int8_operations, last.int8_operations) == (0, 0)  # the file's matrices are floats
        assert row.float_operations == 2 * multiply_adds["row"]
        assert last.float_operations == 2 * multiply_adds["logits"]
        assert row.weight_bytes in (2 * multiply_adds["row"], 4 * multiply_adds["row"])
        ticks = count()
        seconds = step.profile(lambda: float(next(ticks)))
        assert set(seconds) == set(OperationKind)
        step.run()
        again = runner.run([6], [1], [sequence], [0])
        assert (step.rows, step.threads) == (1, 2)
        runner.truncate_sequence(sequence, 0)
        runner.run([5], [0], [sequence], [0])
        assert np.array_equal(runner.run([6], [1], [sequence], [0]), again)
        runner.truncate_sequence(sequence, 0)
        assert np.array_equal(runner.run([5], [0], [sequence], [0]), logits)
        runner.run([1, 2], [1, 2], [sequence] * 2, [1])
        with pytest.raises(ValueError, match="one row"):
            runner.last_step().products()
    finally:
        runner.close()


@pytest.mark.parametrize("name", ["lfm2", "qwen35", "mamba2"])
def test_a_repeated_step_leaves_nothing_to_compute_again(name: str, tmp_path: Path) -> None:
    """Otherwise measuring a decoding step would slow the next one."""
    runner = opened(write(MODELS[name], tmp_path / f"{name}.gguf"), 8 << 20)
    sequence = runner.create_sequence()
    extend(runner, sequence, tokens_of(1, 40))
    for _ in range(3):
        runner.last_step().run()
        runner.passes.clear()
        assert np.isfinite(extend(runner, sequence, [5])).all()
        assert runner.passes == [1]
    runner.close()
