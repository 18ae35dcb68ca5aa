"""Mixtures of experts against NumPy: the experts of a row, their slots, what is packed and summed."""

import numpy as np
import pytest

from cpu_kernels import experts
from cpu_kernels.records import Act, Form, Stage, Step
from tests.cpu_kernels.kernel_harness import Activations, address, aligned, operation, record, run_on_threads

ROWS, EXPERTS, USED, WIDTH, K = 9, 7, 3, 4, 512


def scores_with_ties() -> np.ndarray:
    """Whole numbers, so that most rows have ties, some at the boundary between chosen and not."""
    scores = np.random.default_rng(8).integers(-2, 3, (ROWS, EXPERTS)).astype(np.float32)
    scores[0], scores[1] = 0.0, np.arange(EXPERTS)[::-1]
    return scores


class Routed:
    """The output of route for given scores."""

    def __init__(
        self,
        scores: np.ndarray,
        normalise: bool = False,
        scale: float = 1.0,
        used: int = USED,
        sigmoid: bool = False,
        biases: np.ndarray | None = None,
        groups: tuple[int, int] = (1, 1),
    ) -> None:
        rows, count = scores.shape
        padded = np.zeros((rows, 32), np.float32)
        padded[:, :count] = scores
        self.segments, self.rows = aligned(3 * count + 1, np.int64), aligned(rows * used + count * WIDTH, np.int32)
        self.slots, self.experts = aligned(rows * used, np.int32), aligned(rows * used, np.int32)
        self.weights, factor = aligned(rows * used, np.float32), np.array([scale], np.float32)
        self.step = record(Step.SIZE, {int(Step.ROWS): rows, int(Step.WIDTH) + int(Stage.EXPERT): WIDTH})
        out = map(address, (self.segments, self.rows, self.slots, self.weights, self.experts))
        how = (int(sigmoid), 0 if biases is None else address(biases), 0, *groups)
        op = operation(address(padded), 128, count, used, int(normalise), address(factor), *out, *how)
        run_on_threads(experts.route, op, self.step, 5)
        self.weights, self.slots, self.experts = (
            each.reshape(rows, used) for each in (self.weights, self.slots, self.experts)
        )


@pytest.mark.parametrize("normalise", [False, True])
def test_the_best_experts_are_chosen_and_the_first_of_equals(normalise: bool) -> None:
    scores = scores_with_ties()
    routed = Routed(scores, normalise, scale=2.5)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :USED]
    np.testing.assert_array_equal(routed.experts, best)
    wide = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    softmax = wide / wide.sum(axis=1, keepdims=True)
    expected = np.take_along_axis(softmax, best, axis=1)
    if normalise:
        expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(routed.weights, 2.5 * expected, rtol=1e-6)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_biases_take_part_in_the_choice_alone(sigmoid: bool, normalise: bool) -> None:
    random = np.random.default_rng(3)
    scores = random.standard_normal((ROWS, EXPERTS)).astype(np.float32)
    biases = aligned(EXPERTS, np.float32)
    biases[:] = 0.3 * random.standard_normal(EXPERTS)
    routed = Routed(scores, normalise, sigmoid=sigmoid, biases=biases)
    wide = np.exp(scores.astype(np.float64))
    weights = wide / (1 + wide) if sigmoid else wide / wide.sum(axis=1, keepdims=True)
    best = np.argsort(-(weights + biases), axis=1)[:, :USED]
    assert (best != np.argsort(-weights, axis=1)[:, :USED]).any()
    np.testing.assert_array_equal(routed.experts, best)
    expected = np.take_along_axis(weights, best, axis=1)
    if normalise:
        expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(routed.weights, expected, rtol=1e-6)


@pytest.mark.parametrize("used", [1, 3])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_least_sum_of_the_chosen_experts_is_a_share_of_all(sigmoid: bool, used: int) -> None:
    least = 2.0**-14  # of the sum of the chosen experts' weights, where the weights of all add up to one
    random = np.random.default_rng(6)
    scores = (random.standard_normal((ROWS, EXPERTS)) - 6 * sigmoid).astype(np.float32)
    scores[:, :used] -= np.linspace(0, 14, ROWS, dtype=np.float32)[:, None]
    biases = aligned(EXPERTS, np.float32)
    biases[:used] = 5
    routed = Routed(scores, True, used=used, sigmoid=sigmoid, biases=biases)
    wide = np.exp(scores.astype(np.float64))
    weights = wide / (1 + wide) if sigmoid else wide / wide.sum(axis=1, keepdims=True)
    expected = np.take_along_axis(weights, routed.experts.astype(np.int64), axis=1)
    sums = expected.sum(axis=1, keepdims=True)
    assert (sums < least).any()
    assert (sums > least).any()
    np.testing.assert_allclose(routed.weights, expected / np.maximum(sums, least), rtol=1e-5)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_come_from_the_best_groups(sigmoid: bool, biased: bool) -> None:
    random = np.random.default_rng(5)
    scores = random.standard_normal((40, 12)).astype(np.float32)
    biases = aligned(12, np.float32)
    biases[:] = 0.3 * random.standard_normal(12) * biased
    routed = Routed(scores, True, sigmoid=sigmoid, biases=biases if biased else None, groups=(4, 2))
    wide = np.exp(scores.astype(np.float64))
    weights = wide / (1 + wide) if sigmoid else wide / wide.sum(axis=1, keepdims=True)
    preferences = (weights + biases).reshape(-1, 4, 3)
    best_two = np.sort(preferences, axis=2)[:, :, 1:].sum(axis=2)
    worst_groups = np.argsort(best_two, axis=1)[:, :2]
    np.put_along_axis(preferences, worst_groups[:, :, None], -np.inf, axis=1)
    best = np.argsort(-preferences.reshape(-1, 12), axis=1)[:, :USED]
    assert (best != np.argsort(-(weights + biases), axis=1)[:, :USED]).any()
    np.testing.assert_array_equal(routed.experts, best)
    expected = np.take_along_axis(weights, best, axis=1)
    np.testing.assert_allclose(routed.weights, expected / expected.sum(axis=1, keepdims=True), rtol=1e-6)


def test_slots_stand_by_expert_and_then_by_row_in_whole_tiles() -> None:
    routed = Routed(scores_with_ties())
    count, used = int(routed.segments[0]), 0
    for expert, tile, tiles in routed.segments[1 : 1 + 3 * count].reshape(-1, 3):
        rows = np.flatnonzero((routed.experts == expert).any(axis=1))
        assert tile * WIDTH == used
        assert tiles == -(-len(rows) // WIDTH)
        slots = routed.rows[used : used + tiles * WIDTH]
        np.testing.assert_array_equal(slots[: len(rows)], rows)
        assert (slots[len(rows) :] == -1).all()
        for offset, row in enumerate(rows):
            assert routed.slots[row, list(routed.experts[row]).index(expert)] == used + offset
        used += tiles * WIDTH
    assert used == routed.step[int(Step.ROWS) + int(Stage.EXPERT)]
    assert set(routed.segments[1 : 1 + 3 * count : 3]) == set(routed.experts.ravel())


@pytest.mark.parametrize("normalise", [False, True])
def test_a_score_that_is_not_a_number_is_not_hidden(normalise: bool) -> None:
    scores = scores_with_ties()
    scores[2, 5] = np.nan
    weights = Routed(scores, normalise).weights
    assert np.isnan(weights[2]).all()
    assert np.isfinite(np.delete(weights, 2, axis=0)).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_slots_are_normalised_weighted_and_packed(weighted: bool) -> None:
    random = np.random.default_rng(9)
    x, weight = aligned(3 * K, np.float32), aligned(K, np.float32)
    x[:], weight[:] = random.standard_normal(x.size), random.standard_normal(K)
    rows, epsilon = np.array([2, 0, -1, -1, 1, 2, -1, -1], np.int32), np.array([1e-5], np.float32)
    act = Activations(K)
    step = act.step(len(rows), WIDTH)
    step[int(Step.ROWS) + int(Stage.EXPERT)], step[int(Step.WIDTH) + int(Stage.EXPERT)] = len(rows), WIDTH
    arguments = (address(x), 4 * K, address(weight), K, int(Form.FLOATS), address(act.descriptors), address(epsilon))
    choices, weights = np.array([1, 7, 4, 7, 0, 5], np.int32), random.standard_normal(6).astype(np.float32)
    op = operation(*arguments, address(rows), 2, address(choices), address(weights) if weighted else 0)
    op[5] = Stage.EXPERT
    run_on_threads(experts.expert_pack, op, step, 2)
    wide = x.reshape(3, K).astype(np.float64)
    normalised = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    got = act.values(Act.FLOATS, np.float32, len(rows), WIDTH, K)
    used = rows >= 0
    expected = normalised[rows[used]]
    if weighted:
        expected *= weights[[list(choices).index(slot) for slot in np.flatnonzero(used)]][:, None]
    np.testing.assert_allclose(got[used], expected, rtol=1e-6, atol=1e-7)
    assert not got[~used].any()


@pytest.mark.parametrize("threads", [1, 5])
def test_answers_are_added_with_their_weights(threads: int) -> None:
    random = np.random.default_rng(10)
    x, y = random.standard_normal((ROWS, 96)).astype(np.float32), random.standard_normal((20, 96)).astype(np.float32)
    slots, weights = (
        random.integers(0, 20, (ROWS, USED)).astype(np.int32),
        random.random((ROWS, USED)).astype(np.float32),
    )
    to, answers = aligned(x.size, np.float32), aligned(y.size, np.float32)
    to[:], answers[:] = x.ravel(), y.ravel()
    op = operation(address(to), 384, address(answers), 384, 96, USED, address(slots), address(weights))
    run_on_threads(experts.combine, op, record(Step.SIZE, {int(Step.ROWS): ROWS}), threads)
    expected = x + np.einsum("ru,ruk->rk", weights.astype(np.float64), y[slots])
    np.testing.assert_allclose(to.reshape(x.shape), expected, rtol=1e-5, atol=1e-5)
