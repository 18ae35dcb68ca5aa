"""States of short convolutions: exact after every truncation, fork and restore, and what is recomputed for that."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_io import open_model
from gguf_io.errors import LocalLLMError
from models.config import read_config
from models.kv_layout import kv_bytes_per_token, stored_types
from models.native_runner import NativeRunner
from tests.models.architecture_models import MODELS
from tests.models.state_checks import (
    AFTER_REJECTION,
    Counting,
    check_any_order_of_operations,
    check_rejected_tokens_cost_nothing,
    opened,
)
from tests.models.synthetic import shapes, write
from tests.models.test_determinism import extend, tokens_of, whole

PAGE = 16


@pytest.fixture(scope="module", params=["lfm2", "lfm2-odd"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(MODELS[request.param], tmp_path_factory.mktemp("models") / f"{request.param}.gguf")


@pytest.fixture
def runner(path: Path) -> Iterator[Counting]:
    runner = opened(path, 32 << 20)
    yield runner
    runner.check_integrity(set(runner.sequences))
    runner.close()


@pytest.mark.parametrize("length", AFTER_REJECTION)
def test_rejected_tokens_cost_nothing(runner: Counting, length: int) -> None:
    check_rejected_tokens_cost_nothing(runner, length)


@pytest.mark.parametrize(("length", "again"), [(40, 8), (47, 15), (48, 0), (33, 1), (100, 0)])
def test_a_fork_computes_less_than_a_page_again(runner: Counting, length: int, again: int) -> None:
    tokens, other = tokens_of(1, 100), tokens_of(2, 20)
    sequence = runner.create_sequence()
    extend(runner, sequence, tokens)
    fork = runner.fork_sequence(sequence, length)
    runner.passes.clear()
    rows = extend(runner, fork, other)
    assert runner.passes == ([again] if again else []) + [len(other)]
    np.testing.assert_array_equal(rows, whole(runner, tokens[:length] + other)[length:])
    np.testing.assert_array_equal(extend(runner, sequence, other), whole(runner, tokens + other)[100:])


def test_forks_of_one_page_continue_together(runner: Counting) -> None:
    tokens = tokens_of(3, 64)
    sequence = runner.create_sequence()
    extend(runner, sequence, tokens)
    forks = [runner.fork_sequence(sequence, length) for length in range(16, 64)]
    runner.passes.clear()
    rows = runner.run([7] * 48, range(16, 64), forks, range(48)).copy()
    assert sum(runner.passes[:-1]) == 3 * sum(range(PAGE))
    for length, row in zip(range(16, 64), rows, strict=True):
        np.testing.assert_array_equal(row, whole(runner, [*tokens[:length], 7])[-1])


def test_a_cut_leaves_forks_as_they_were(runner: Counting) -> None:
    tokens = tokens_of(4, 60)
    sequence = runner.create_sequence()
    extend(runner, sequence, tokens[:50])
    extend(runner, sequence, tokens[50:])
    fork = runner.fork_sequence(sequence, 60)
    runner.truncate_sequence(sequence, 53)
    expected = whole(runner, [*tokens, 9])[-1]
    extend(runner, sequence, [1, 2, 3])
    np.testing.assert_array_equal(extend(runner, fork, [9])[-1], expected)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_operations(runner: Counting, seed: int) -> None:
    check_any_order_of_operations(runner, runner, seed, most_new=25)


@pytest.mark.parametrize("name", ["lfm2", "lfm2-odd"])
def test_plans_count_what_pages_keep(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    heads = model.extra["attention.head_count_kv"]
    attention = sum(heads) * 2 * (2 * 64 + 4)  # keys and values in f16, heads padded
    rows = heads.count(0) * (model.extra["shortconv.l_cache"] - 1) * 4 * -(-model.embedding // 32) * 32
    with open_model(write(model, tmp_path / "model.gguf")) as file:
        config = read_config(file)
        stated = kv_bytes_per_token(config, stored_types(config, ("f16", "f16")))
        runner = NativeRunner(file, kv_bytes=1 << 20, threads=1)
    runner.close()
    assert stated == runner.info.kv_bytes_per_token == attention + rows // PAGE + 4  # and a token's id
    assert (1 << 20) - PAGE * stated < runner.info.pages_total * PAGE * stated <= 1 << 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count_kv": [0, 0, 2, 0, 3]}, "4 heads of layer 4 cannot share 3 key-value heads"),
        ({"attention.head_count_kv": [0, 0, 2, 0]}, "has 4 numbers for 5 layers"),
        ({"attention.head_count_kv": [0] * 5}, "gives no layer key-value heads"),
        ({"shortconv.l_cache": 1}, r"lfm2\.shortconv\.l_cache"),
        ({"shortconv.l_cache": 18}, r"lfm2\.shortconv\.l_cache"),
        ({"shortconv.l_cache": 4}, r"shortconv\.conv\.weight has the shape \(256, 3\) instead of \(256, 4\)"),
    ],
    ids=str,
)
def test_metadata_that_does_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = MODELS["lfm2"]
    changed = replace(model, extra={**model.extra, **changes})
    values = {name: np.zeros(shape, np.float32) for name, shape in {**shapes(changed), **shapes(model)}.items()}
    path = write(changed, tmp_path / "model.gguf", values=values)
    with open_model(path) as file, pytest.raises(LocalLLMError, match=message):
        NativeRunner(file, kv_bytes=1 << 20, threads=1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lfm2", {"added": {"shortconv.in_proj.weight": "all parts, width"}}, r"shortconv\.conv\.weight is missing"),
        ("lfm2", {"beside": {"dense_2.weight": "width, width"}}, r"the tensor dense_2\.weight would not be used"),
        ("lfm2moe", {"extra": {"expert_gating_func": 3}}, r"expert_gating_func is 3"),
    ],
    ids=str,
)
def test_files_that_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = MODELS[name]
    if "extra" in changes:
        changes = {"extra": {**model.extra, **changes["extra"]}}
    path = write(replace(model, **changes), tmp_path / "model.gguf")
    with open_model(path) as file, pytest.raises(LocalLLMError, match=message):
        NativeRunner(file, kv_bytes=1 << 20, threads=1)
