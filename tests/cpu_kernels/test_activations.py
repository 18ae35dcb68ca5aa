"""Activations as input of products: norms and gates against NumPy, packing against a plain quantiser."""

import numpy as np
import pytest
from kernel_harness import ALL_FORMS, Activations, address, aligned, operation, quantized, run_on_threads

from cpu_kernels import activations
from cpu_kernels.isa import POLICY
from cpu_kernels.records import Act, Step

K = 512


def rows_of(count: int, seed: int = 3) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((count, K)).astype(np.float32)
    x[0, :32] = 0.0
    x[-1, 256:] *= 1e-3
    return x


def aligned_copy(x: np.ndarray) -> np.ndarray:
    copy = aligned(x.size, np.float32)
    copy[:] = x.ravel()
    return copy


@pytest.mark.parametrize(("rows", "width", "threads"), [(1, 1, 2), (5, 4, 2), (5, 8, 3), (13, 12, 1), (16, 8, 2)])
def test_packed_activations_are_those_of_a_plain_quantiser(rows: int, width: int, threads: int) -> None:
    x, act = rows_of(rows), Activations(K)
    act.pack(x, width, threads)

    values, scales = quantized(x, 32)
    np.testing.assert_array_equal(act.values(Act.Q32, np.int8, rows, width, K, 4), values)
    np.testing.assert_array_equal(act.values(Act.SCALE32, np.float32, rows, width, K // 32), scales)
    sums = values.reshape(rows, -1, 32).sum(axis=2, dtype=np.int64)
    np.testing.assert_array_equal(act.values(Act.SUM32, np.int32, rows, width, K // 32), -128 * sums)

    values, scales = quantized(x, 256)
    np.testing.assert_array_equal(act.values(Act.Q256, np.int8, rows, width, K, 4), values)
    np.testing.assert_array_equal(act.values(Act.SCALE256, np.float32, rows, width, K // 256), scales)
    sums = values.reshape(rows, -1, 4, 2, 2).sum(axis=(2, 4), dtype=np.int64)
    if POLICY.int16_accumulators:
        got = act.values(Act.SUM16, np.int16, rows, width, K // 8, 2)
        np.testing.assert_array_equal(got, -32 * sums.reshape(rows, -1))
    else:
        got = act.values(Act.SUM16, np.int32, rows, width, K // 16)
        np.testing.assert_array_equal(got, -32 * sums.sum(axis=2))
    pairs = values.reshape(rows, -1, 8, 32).sum(axis=3, dtype=np.int64)[:, :, [0, 2, 1, 3, 4, 6, 5, 7]]
    np.testing.assert_array_equal(act.values(Act.PAIRS256, np.int16, rows, width, K // 32, 2), pairs.reshape(rows, -1))

    np.testing.assert_array_equal(act.values(Act.FLOATS, np.float32, rows, width, K), x)


@pytest.mark.parametrize(("k", "width"), [(512, 4), (512, 8), (48, 4), (40, 4)])
def test_norm_is_rms_norm(k: int, width: int) -> None:
    """Rows of 48 and 40 values leave the last vector half full; memory beyond a row is zero.

    A tile of eight is shared by two threads, which divide its values.
    """
    rows, padded = 6, (k + 15) // 16 * 16
    rng = np.random.default_rng(4)
    x, weight = aligned(rows * padded, np.float32), aligned(padded, np.float32)
    x.reshape(rows, padded)[:, :k] = rng.standard_normal((rows, k))
    weight[:k] = rng.standard_normal(k)
    epsilon = np.array([1e-5], dtype=np.float32)
    act = Activations(512)
    step = act.step(rows, width)
    op = operation(address(x), padded * 4, address(weight), k, 4, address(act.descriptors), address(epsilon), 0)
    run_on_threads(activations.norm_pack, op, step, 2)
    wide = x.reshape(rows, padded)[:, :k].astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight[:k]
    np.testing.assert_allclose(act.values(Act.FLOATS, np.float32, rows, width, k), expected, rtol=1e-6, atol=1e-7)


def test_wanted_rows_are_gathered() -> None:
    x, act = rows_of(6), Activations(K)
    source, epsilon = aligned_copy(x), np.zeros(1, np.float32)
    wanted = np.array([4, 0], dtype=np.int32)
    step = act.step(2, 4)
    step[Step.WANTED] = address(wanted)
    op = operation(address(source), K * 4, 0, K, ALL_FORMS, address(act.descriptors), address(epsilon), 1)
    run_on_threads(activations.norm_pack, op, step, 1)
    np.testing.assert_array_equal(act.values(Act.FLOATS, np.float32, 2, 4, K), x[wanted])


def test_norm_add_adds_the_normalised_rows() -> None:
    x, y = rows_of(5, seed=5), rows_of(5, seed=6)
    weight = rows_of(1, seed=7)[0]
    into, source, weights = aligned_copy(x), aligned_copy(y), aligned_copy(weight)
    epsilon = np.array([1e-6], dtype=np.float32)
    act = Activations(K)
    op = operation(address(into), K * 4, address(source), K * 4, address(weights), K, address(epsilon))
    run_on_threads(activations.norm_add, op, act.step(5, 4), 2)
    wide = y.astype(np.float64)
    expected = x + wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(into.reshape(5, K), expected, rtol=1e-6, atol=1e-6)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gpt-oss's gate as its published reference computes it (openai/gpt-oss, swiglu with a limit of 7)."""
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def xielu(x: np.ndarray, up: np.ndarray) -> np.ndarray:
    """As transformers' XIELUActivation; its factors are the first values of `up`."""
    negative, positive, linear, bound = up[0, :4]
    return linear * x + np.where(x > 0, positive * x * x, negative * (np.expm1(np.minimum(x, bound)) - x))


GATES = {
    activations.GATE_SILU: lambda gate, up: silu(gate) * up,
    activations.GATE_GELU: lambda gate, up: gelu_tanh(gate) * up,
    activations.GATE_CLAMPED: clamped,
    activations.GELU_ALONE: lambda gate, up: gelu_tanh(gate),
    activations.GATE_RELU: lambda gate, up: np.maximum(gate, 0) * up,
    activations.GATE_SIGMOID: lambda gate, up: up / (1 + np.exp(-gate)),
    activations.XIELU_ALONE: xielu,
}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(("rows", "width", "threads"), [(1, 1, 2), (5, 4, 1), (5, 8, 3)])
def test_gates(kind: int, rows: int, width: int, threads: int) -> None:
    gate, up = rows_of(rows, seed=8) * np.float32(4), rows_of(rows, seed=9) * np.float32(4)
    gate[:, 100:104] = [-80.0, 80.0, -0.0, 1e-20]
    gates, ups, act = aligned_copy(gate), aligned_copy(up), Activations(K)
    op = operation(address(gates), address(ups), K * 4, K, ALL_FORMS, address(act.descriptors), kind)
    run_on_threads(activations.gate_pack, op, act.step(rows, width), threads)
    # Even for one row, gate_pack fills the descriptor that all threads share.
    act.buffers[1] = act.buffers[0]
    got = act.values(Act.FLOATS, np.float32, rows, width, K)
    with np.errstate(over="ignore"):
        expected = GATES[kind](gate.astype(np.float64), up.astype(np.float64))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    values, scales = quantized(np.ascontiguousarray(got), 32)
    np.testing.assert_array_equal(act.values(Act.Q32, np.int8, rows, width, K, 4), values)
    np.testing.assert_array_equal(act.values(Act.SCALE32, np.float32, rows, width, K // 32), scales)


@pytest.mark.parametrize("threads", [1, 5])
def test_an_activation_in_place(threads: int) -> None:
    y, act = rows_of(3, seed=12) * np.float32(4), Activations(K)
    found = aligned_copy(y)
    op = operation(address(found), K * 4, K - 16, activations.GELU_ALONE)
    run_on_threads(activations.activate, op, act.step(3, 4), threads)
    expected = np.concatenate([gelu_tanh(y[:, : K - 16].astype(np.float64)), y[:, K - 16 :]], axis=1)
    np.testing.assert_allclose(found.reshape(3, K), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("rows", "threads"), [(1, 2), (5, 3)])
def test_values_are_kept_within_limits(rows: int, threads: int) -> None:
    x, ends = rows_of(rows, seed=13) * np.float32(2), np.array([-1.25, 0.5], np.float32)
    expected = np.clip(x, *ends)
    found, act = aligned_copy(x), Activations(K)
    run_on_threads(
        activations.limit_rows, operation(address(found), K * 4, K, address(ends)), act.step(rows, 1), threads
    )
    np.testing.assert_array_equal(found.reshape(rows, K), expected)
    source, epsilon = aligned_copy(x), np.zeros(1, np.float32)
    packing = (K, ALL_FORMS, address(act.descriptors))
    op = operation(address(source), K * 4, 0, *packing, address(epsilon), 0, address(ends))
    run_on_threads(activations.norm_pack, op, act.step(rows, 1), threads)
    np.testing.assert_array_equal(act.values(Act.FLOATS, np.float32, rows, 1, K), expected)
    op = operation(address(source), address(source), K * 4, *packing, activations.SQUARED_RELU_ALONE, 0, address(ends))
    run_on_threads(activations.gate_pack, op, act.step(rows, 1), threads)
    act.buffers[1] = act.buffers[0]
    squares = np.clip(np.maximum(x, 0) ** 2, *ends)
    np.testing.assert_array_equal(act.values(Act.FLOATS, np.float32, rows, 1, K), squares)


@pytest.mark.parametrize("threads", [1, 5])
def test_soft_cap_is_a_tangent(threads: int) -> None:
    y = rows_of(3, seed=10) * np.float32(40)
    y[0, :4] = (-1e30, 1e30, 0.0, 30.0)
    capped, cap = aligned_copy(y), np.array([30.0], np.float32)
    run_on_threads(
        activations.soft_cap, operation(address(capped), K * 4, K, address(cap)), Activations(K).step(3, 1), threads
    )
    np.testing.assert_allclose(capped.reshape(3, K), 30 * np.tanh(y.astype(np.float64) / 30), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("kind", GATES)
def test_what_is_not_a_number_is_not_hidden_by_a_gate(kind: int, poison: float) -> None:
    """`up` too; clamping makes infinities finite, as intended."""
    for where in ("gate", "up"):
        rows = {"gate": rows_of(1, seed=8), "up": rows_of(1, seed=9)}
        rows[where][0, 300] = poison
        if (where == "up" and kind in (activations.GELU_ALONE, activations.XIELU_ALONE)) or (
            poison == np.inf
            and (kind == activations.GATE_CLAMPED or (where == "gate" and kind == activations.GATE_SIGMOID))
        ):
            continue
        gates, ups, act = aligned_copy(rows["gate"]), aligned_copy(rows["up"]), Activations(K)
        op = operation(address(gates), address(ups), K * 4, K, ALL_FORMS, address(act.descriptors), kind)
        run_on_threads(activations.gate_pack, op, act.step(1, 1), 1)
        act.buffers[1] = act.buffers[0]
        got = act.values(Act.FLOATS, np.float32, 1, 1, K)[0]
        assert not np.isfinite(got[300])
        assert np.isfinite(np.delete(got, 300)).all()
        assert not np.isfinite(act.values(Act.SCALE32, np.float32, 1, 1, K // 32)[0, 300 // 32])
        assert not np.isfinite(act.values(Act.SCALE256, np.float32, 1, 1, K // 256)[0, 1])
