"""Selective scans in varying files: required and optional tensors, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_io import open_model
from gguf_io.errors import LocalLLMError
from models.config import read_config
from models.kv_layout import LEAST_SLOTS, kv_bytes_per_token, slots_within, state_bytes, stored_types
from models.native_runner import NativeRunner
from tests.models.architecture_models import MODELS
from tests.models.scan_models import SCAN_MODELS
from tests.models.synthetic import scans, shapes, write
from tests.models.test_determinism import tokens_of, whole

PAGE, BUDGET = 16, 64 << 20


def results(path: Path, tokens: list[int]) -> np.ndarray:
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=BUDGET, threads=1)
    rows = whole(runner, tokens)
    runner.close()
    return rows


@pytest.mark.parametrize("name", SCAN_MODELS)
def test_plans_count_states(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    heads, inner, groups, size, reach = (
        model.extra[f"ssm.{key}"]
        for key in ("time_step_rank", "inner_size", "group_count", "state_size", "conv_kernel")
    )
    state, values = -(-size // 16) * 16, -(-inner // heads // 16) * 16
    layers = sum(scans(model, layer) for layer in range(model.layers))
    kv_heads = sum(model.of_layer(layer).kv_heads for layer in range(model.layers))
    attention = kv_heads * 2 * (2 * (-(-model.head // 32) * 32) + 4)  # keys and values in f16, heads padded
    with open_model(write(model, tmp_path / "model.gguf")) as file:
        config = read_config(file)
        stated = kv_bytes_per_token(config, stored_types(config, ("f16", "f16")))
        runner = NativeRunner(file, kv_bytes=BUDGET, threads=1)
    runner.close()
    assert stated == runner.info.kv_bytes_per_token == attention + 4  # and a token's id
    assert config.slot_sizes is not None
    units = config.slot_sizes.slot_parts
    assert units % groups == 0 and heads % units == 0
    of_heads = heads * (values * state + PAGE * values + PAGE + (reach - 1 + PAGE) * values)
    assert config.slot_sizes.slot_bytes == 4 * layers * (of_heads + units * state * (PAGE + 2 * (reach - 1 + PAGE)))
    taken = state_bytes(config, BUDGET)
    assert taken == slots_within(config.slot_sizes, BUDGET) * config.slot_sizes.slot_bytes <= BUDGET // 4
    assert runner.info.pages_total * PAGE * stated + taken <= BUDGET
    assert slots_within(config.slot_sizes, 0) == LEAST_SLOTS


def test_a_convolution_without_biases(tmp_path: Path) -> None:
    """Equal to a model whose biases are zeros."""
    model = MODELS["granitehybrid"]
    random = np.random.default_rng(3)
    values = {name: 0.1 * random.standard_normal(shape, np.float32) for name, shape in shapes(model).items()}
    values |= {name: 0 * value for name, value in values.items() if name.endswith("conv1d.bias")}
    values |= {name: -np.exp(value) for name, value in values.items() if name.endswith("ssm_a")}
    tokens = tokens_of(4, 40)
    zeros = results(write(model, tmp_path / "zeros.gguf", values=values), tokens)
    without = {name: shape for name, shape in model.added.items() if name != "ssm_conv1d.bias"}
    path = write(replace(model, added=without), tmp_path / "none.gguf", values=values)
    assert np.isfinite(zeros).all() and zeros.std() > 0
    np.testing.assert_array_equal(results(path, tokens), zeros)


def test_norms_that_llama_cpp_stores_as_vectors(tmp_path: Path) -> None:
    """llama.cpp's quantiser drops a dimension of 1."""
    model = MODELS["granitehybrid"]
    flat = replace(model, added={**model.added, "ssm_norm.weight": "scanned"})
    tokens = tokens_of(4, 20)
    paths = [write(one, tmp_path / f"{i}.gguf") for i, one in enumerate((model, flat))]
    np.testing.assert_array_equal(*(results(path, tokens) for path in paths))


@pytest.mark.parametrize("name", ["granitehybrid", "falcon-h1", "nemotron_h", "mamba2"])
@pytest.mark.parametrize("wanted", [[0], [39], [5, 6, 7, 20], list(range(1, 40, 2))])
def test_wanted_rows_are_those_of_all(name: str, wanted: list[int], tmp_path: Path) -> None:
    """Networks after the last scan are computed only for wanted rows."""
    path, tokens = write(MODELS[name], tmp_path / "model.gguf"), tokens_of(2, 40)
    with open_model(path) as file:
        assert read_config(file).narrows == (name == "nemotron_h")
        runner = NativeRunner(file, kv_bytes=BUDGET, threads=2)
    expected = whole(runner, tokens)
    sequence = runner.create_sequence()
    rows = runner.run(tokens, range(40), [sequence] * 40, wanted).copy()
    runner.close()
    np.testing.assert_array_equal(rows, expected[wanted])


@pytest.mark.parametrize(
    "missing", ["ssm_in", "ssm_conv1d", "ssm_dt", "ssm_a", "ssm_d", "ssm_norm", "ssm_out", "attn_q", "ffn_up"]
)
def test_tensors_that_are_missing(missing: str, tmp_path: Path) -> None:
    model = MODELS["granitehybrid"]
    layer = 2 if missing == "attn_q" else 1
    names = [f"blk.{layer}.{missing}{end}" for end in ("", ".weight", ".bias")]
    if missing == "ssm_conv1d":
        names = names[:2]
    path = write(replace(model, dropped=tuple(names)), tmp_path / "model.gguf")
    with open_model(path) as file, pytest.raises(LocalLLMError, match=rf"blk\.{layer}\.{missing}\S* (is missing|has)"):
        NativeRunner(file, kv_bytes=1 << 20, threads=1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("granitehybrid", {"ssm.group_count": 3}, "16 heads in 3 groups do not make a selective scan of 512"),
        ("granitehybrid", {"ssm.inner_size": 500}, "do not make a selective scan of 500"),
        ("granitehybrid", {"ssm.inner_size": 32768}, "do not make a selective scan of 32768"),
        ("granitehybrid", {"ssm.time_step_rank": 0}, r"granitehybrid\.ssm\.time_step_rank"),
        ("granitehybrid", {"ssm.conv_kernel": 1}, r"granitehybrid\.ssm\.conv_kernel"),
        ("granitehybrid", {"ssm.conv_kernel": 18}, r"granitehybrid\.ssm\.conv_kernel"),
        ("granitehybrid", {"ssm.conv_kernel": 3}, r"ssm_conv1d\.weight has the shape \(640, 4\)"),
        ("granitehybrid", {"ssm.state_size": 1 << 12}, r"granitehybrid\.ssm\.state_size"),
        ("granitehybrid", {"ssm.state_size": 32}, r"ssm_in\.weight has the shape"),
        ("granitehybrid", {"attention.head_count_kv": [0] * 5}, "gives no layer key-value heads"),
        ("granitehybrid", {"attention.head_count_kv": [2] * 5}, "no layer of granitehybrid has a selective scan"),
        ("granitehybrid", {"attention.head_count_kv": [0, 2]}, "2 numbers for 5 layers"),
        (
            "nemotron_h",
            {"feed_forward_length": [0, 512, 0, 8, 0, 512]},
            "layer 3 has key-value heads and a feed-forward",
        ),
        ("nemotron_h", {"feed_forward_length": 0}, r"blk\.1\.ssm_in\.weight is missing"),
        ("mamba2", {"feed_forward_length": 64}, r"blk\.0\.ffn_\S* is missing"),
    ],
    ids=str,
)
def test_metadata_that_does_not_fit(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(MODELS[name], tmp_path / "model.gguf", metadata=changes)
    with open_model(path) as file, pytest.raises(LocalLLMError, match=message):
        NativeRunner(file, kv_bytes=1 << 20, threads=1)


@pytest.mark.parametrize("key", ["conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count"])
def test_metadata_that_is_missing(key: str, tmp_path: Path) -> None:
    path = write(MODELS["mamba2"], tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"mamba2.ssm." + key.encode(), b"mamba2.xxx." + key.encode()))
    with open_model(path) as file, pytest.raises(LocalLLMError, match=rf"mamba2\.ssm\.{key}"):
        NativeRunner(file, kv_bytes=1 << 20, threads=1)
