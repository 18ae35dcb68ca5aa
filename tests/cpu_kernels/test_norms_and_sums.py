"""Layer norm, norms of queries and keys, and sums of rows, against NumPy in double precision."""

import numpy as np
import pytest

from cpu_kernels import norms, sums
from cpu_kernels.records import Act, Form, Step
from tests.cpu_kernels.kernel_harness import Activations, address, aligned, operation, record, run_on_threads

RANDOM = np.random.default_rng(4)


def filled(values: np.ndarray) -> np.ndarray:
    """A copy that is aligned to a cache line."""
    copy = aligned(values.size, np.float32)
    copy[:] = values.ravel()
    return copy


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("k", "with_bias"), [(64, True), (96, False), (80, True)])
def test_layer_norm(k: int, with_bias: bool) -> None:
    x, weight, bias, epsilon = normal(3, 96), normal(96), normal(96), filled(np.array([1e-3]))
    weight[k:] = bias[k:] = 0
    act = Activations(k)
    source, w, b, ends = filled(x), filled(weight), filled(bias), filled(np.array([-0.5, 0.8], np.float32))
    arguments = (address(source), 96 * 4, address(w), k, int(Form.FLOATS), address(act.descriptors), address(epsilon))
    more = (0, address(ends), address(b) if with_bias else 0)
    run_on_threads(norms.layer_norm_pack, operation(*arguments, *more), act.step(3, 1), 2)
    rows = x[:, :k].astype(np.float64)
    centred = rows - rows.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-3) * weight[:k] + with_bias * bias[:k]
    expected = np.clip(expected, -0.5, 0.8)
    got = act.values(Act.FLOATS, np.float32, 3, 1, k)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_position", [False, True])
def test_norm_of_a_sum(by_position: bool) -> None:
    x, y, weight, bias, k = normal(3, 96), normal(6, 96), normal(96), normal(96), 80
    weight[k:] = bias[k:] = 0
    positions = np.array([5, 0, 2], np.int32)
    rows, added, w, b, epsilon = filled(x), filled(y), filled(weight), filled(bias), filled(np.array([1e-3]))
    step = record(Step.SIZE, {int(Step.ROWS): 3, int(Step.POSITIONS): address(positions)})
    arguments = (address(rows), 96 * 4, address(added), 96 * 4, int(by_position), address(w), address(b), k)
    run_on_threads(norms.add_norm, operation(*arguments, address(epsilon)), step, 2)
    total = (x + y[positions if by_position else slice(3)])[:, :k].astype(np.float64)
    centred = total - total.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-3) * weight[:k] + bias[:k]
    np.testing.assert_allclose(rows.reshape(x.shape)[:, :k], expected, rtol=1e-5, atol=1e-5)


def test_norm_of_all_heads_together() -> None:
    """Two heads of 24 values, stored as 32."""
    x = np.zeros((3, 2, 32), np.float32)
    x[:, :, :24] = normal(3, 2, 24)
    weight = np.zeros((2, 32), np.float32)
    weight[:, :24] = normal(2, 24)
    rows, w, epsilon = filled(x), filled(weight), filled(np.array([1e-3]))
    step = record(Step.SIZE, {int(Step.ROWS): 3})
    op = operation(address(rows), 64 * 4, address(w), 48, 64, address(epsilon))
    run_on_threads(norms.norm_rows, op, step, 2)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).sum((1, 2), keepdims=True) / 48 + 1e-3) * weight
    np.testing.assert_allclose(rows.reshape(x.shape), expected, rtol=1e-5, atol=1e-6)


def test_rotation_before_the_norm() -> None:
    x, weight, angles = normal(2, 3, 32), normal(32), RANDOM.uniform(0, 6, (9, 16))
    table = filled(np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32))
    rows, w, epsilon = filled(x), filled(weight), filled(np.array([1e-3]))
    positions = np.array([8, 5], np.int32)
    scratch = aligned(4096)
    fields = {Step.ROWS: 2, Step.ROPE_ROWS: address(positions), Step.ROPE_TABLES + 1: address(table)}
    fields |= {Step.SCRATCH: address(scratch), Step.SCRATCH_STRIDE: 2048}
    step = record(Step.SIZE, {int(key): value for key, value in fields.items()})
    op = operation(address(rows), 3, address(w), 32, 32, 1, address(epsilon))
    run_on_threads(norms.turn_then_normalise, op, step, 2)
    cos, sin = np.cos(angles[positions])[:, None], np.sin(angles[positions])[:, None]
    a, b = x[:, :, :16].astype(np.float64), x[:, :, 16:].astype(np.float64)
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], 2)
    expected = turned / np.sqrt((turned**2).mean(2, keepdims=True) + 1e-3) * weight
    np.testing.assert_allclose(rows.reshape(x.shape), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_sum_of_rows(gated: bool) -> None:
    x, y, gates = normal(3, 48), normal(3, 48), normal(3, 32)
    to, extra, scores = filled(x), filled(y), filled(gates)
    arguments = (address(to), 48 * 4, address(extra), 48 * 4, 48, address(scores) if gated else 0, 32 * 4)
    run_on_threads(sums.add_rows, operation(*arguments), record(Step.SIZE, {int(Step.ROWS): 3}), 2)
    factor = 1 / (1 + np.exp(-gates[:, :1].astype(np.float64))) if gated else 1.0
    np.testing.assert_allclose(to.reshape(x.shape), x + factor * y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("gates", "size"), [(3, 16), (2, 24), (48, 1)])
def test_rows_times_the_softplus_of_gates(gates: int, size: int) -> None:
    x, scores = normal(3, 48), normal(3, 64) * np.float32(20)
    rows, factors = filled(x), filled(scores)
    op = operation(address(rows), 48 * 4, address(factors), 64 * 4, gates, size)
    run_on_threads(sums.scale_by_gates, op, record(Step.SIZE, {int(Step.ROWS): 3}), 2)
    expected = x * np.repeat(np.logaddexp(0, scores[:, :gates].astype(np.float64)), size, axis=1)
    np.testing.assert_allclose(rows.reshape(x.shape), expected, rtol=1e-6, atol=1e-6)


def test_copies_of_rows_leave_what_is_beside_them() -> None:
    x, y = normal(3, 48), normal(3, 96)
    source, target = filled(x), filled(y)
    op = operation(address(target) + 32 * 4, 96 * 4, address(source), 48 * 4, 48)
    run_on_threads(sums.copy_rows, op, record(Step.SIZE, {int(Step.ROWS): 3}), 2)
    expected = y.copy()
    expected[:, 32:80] = x
    np.testing.assert_array_equal(target.reshape(y.shape), expected)


def test_biases_of_experts() -> None:
    """Slots in tiles of two: expert 2 has the first tile, expert 0 the next two."""
    y, biases = normal(6, 48), normal(3, 48)
    slots, extra = filled(y), filled(biases)
    segments = np.array([2, 2, 0, 1, 0, 1, 2], np.int64)
    step = record(Step.SIZE, {int(Step.ROWS): 6, int(Step.WIDTH): 2})
    op = operation(address(slots), 48 * 4, address(extra), address(segments))
    run_on_threads(sums.add_expert_bias, op, step, 2)
    np.testing.assert_array_equal(slots.reshape(y.shape), y + biases[[2, 2, 0, 0, 0, 0]])


def test_factors_of_experts() -> None:
    y, factors = normal(6, 48), normal(3)
    slots, each = filled(y), filled(factors)
    step = record(Step.SIZE, {int(Step.ROWS): 6, int(Step.WIDTH): 2})
    op = operation(address(slots), 48 * 4, address(each), address(np.array([2, 2, 0, 1, 0, 1, 2], np.int64)))
    run_on_threads(sums.scale_by_expert, op, step, 2)
    np.testing.assert_array_equal(slots.reshape(y.shape), y * factors[[2, 2, 0, 0, 0, 0], None])


@pytest.mark.parametrize("addend", [None, "bias", "rows", "itself"])
def test_a_product_with_an_addend(addend: str | None) -> None:
    """A bias is the same for all rows, and the addend may be the output."""
    x, y, added = normal(3, 48), normal(3, 48), normal(3, 48)
    source, to, extra = filled(x), filled(y), filled(added)
    place, stride = {
        None: (0, 0),
        "bias": (address(extra), 0),
        "rows": (address(extra), 192),
        "itself": (address(to), 192),
    }[addend]
    op = operation(address(to), 192, address(source), 192, 48, address(filled(np.float32([0.7]))), place, stride)
    run_on_threads(sums.scale_and_add, op, record(Step.SIZE, {int(Step.ROWS): 3}), 2)
    expected = {None: 0, "bias": added[:1], "rows": added, "itself": y}[addend]
    np.testing.assert_allclose(to.reshape(x.shape), x * np.float32(0.7) + expected, rtol=1e-6, atol=1e-6)
