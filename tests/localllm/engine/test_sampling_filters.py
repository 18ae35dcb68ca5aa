"""Each filter's definition in NumPy against a naive reference in plain Python floats, on logits of every kind."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from localllm.engine.request import SamplingParams
from localllm.engine.sampling.penalties import DryPenalty, penalise_repeats, repeat_lengths
from tests.localllm.engine import sampling_oracle as filters
from tests.localllm.engine.sampling_oracle import Candidates, largest

Logits = dict[int, float]
MARGIN = 1e-9

finite_logits = st.lists(
    st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0, -1.0, 30.0]), min_size=1, max_size=60
)
min_keeps = st.integers(0, 5)


def candidates(values: list[float], stride: int = 3) -> Candidates:
    return Candidates(np.arange(len(values)) * stride, np.array(values, dtype=np.float32))


def survivors(result: Candidates) -> list[int]:
    assert np.all(np.diff(result.ids) > 0)
    return (result.ids // 3).tolist()


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / math.fsum(weights) for weight in weights]


def by_falling(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda position: (-scores[position], position))


def smallest_prefix(order: list[int], weights: list[float], reached: Callable[[float], bool], mass: float) -> int:
    """How many of the order are taken until reached(sum of weights); skips examples on the edge."""
    total = 0.0
    for taken, position in enumerate(order, start=1):
        total += weights[position]
        if abs(total - mass) < MARGIN:
            reject()
        if reached(total):
            return taken
    return len(order)


@given(finite_logits, st.integers(1, 70))
def test_top_k_keeps_the_highest_and_the_lowest_ids_of_a_tie(values: list[float], count: int) -> None:
    expected = sorted(by_falling(values)[:count])
    assert survivors(filters.top_k(candidates(values), count)) == expected
    assert largest(np.array(values), count).tolist() == expected


@pytest.mark.parametrize("count", [1, 7, 40])
@pytest.mark.parametrize("levels", [1, 5, 200, 10**6])
def test_the_largest_of_many_values_are_those_of_a_sort(levels: int, count: int) -> None:
    values = np.random.default_rng(levels).integers(levels, size=5003).astype(np.float32)
    values[::3] = -np.inf
    assert largest(values, count).tolist() == sorted(np.argsort(-values, kind="stable")[:count].tolist())


@given(finite_logits, st.floats(0.01, 0.99), min_keeps)
def test_top_p_keeps_the_smallest_nucleus(values: list[float], mass: float, min_keep: int) -> None:
    probabilities = softmax(values)
    order = by_falling(probabilities)
    kept = max(smallest_prefix(order, probabilities, lambda total: total >= mass, mass), min_keep)
    assert survivors(filters.top_p(candidates(values), mass, min_keep)) == sorted(order[:kept])


def test_top_p_finds_a_nucleus_larger_than_its_first_look() -> None:
    values = np.linspace(0, 1, 5000).tolist()
    probabilities = softmax(values)
    order = by_falling(probabilities)
    kept = smallest_prefix(order, probabilities, lambda total: total >= 0.8, 0.8)
    assert kept > filters.USUAL_NUCLEUS
    assert survivors(filters.top_p(candidates(values), 0.8, 1)) == sorted(order[:kept])
    assert survivors(filters.top_p(candidates(values), 0.01, 3000)) == sorted(order[:3000])


@given(finite_logits, st.floats(0.01, 0.99), min_keeps)
def test_min_p_keeps_what_is_near_the_best(values: list[float], share: float, min_keep: int) -> None:
    probabilities = softmax(values)
    ratios = [probability / max(probabilities) for probability in probabilities]
    assume(all(abs(ratio - share) > 1e-6 for ratio in ratios))
    kept = [position for position, ratio in enumerate(ratios) if ratio >= share]
    if len(kept) < min_keep:
        kept = sorted(by_falling(values)[:min_keep])
    assert survivors(filters.min_p(candidates(values), share, min_keep)) == kept


@given(finite_logits, st.floats(0.01, 0.99), min_keeps)
def test_typical_p_keeps_what_surprises_as_expected(values: list[float], mass: float, min_keep: int) -> None:
    probabilities = softmax(values)
    entropy = -math.fsum(p * math.log(p) for p in probabilities)
    oddity = [abs(-math.log(p) - entropy) for p in probabilities]
    distinct = sorted(set(values))
    by_value = dict(zip(values, oddity, strict=True))
    gaps = sorted(by_value[value] for value in distinct)
    assume(all(b - a > MARGIN for a, b in pairwise(gaps)))
    order = by_falling([-odd for odd in oddity])
    kept = max(smallest_prefix(order, probabilities, lambda total: total > mass, mass), min_keep)
    assert survivors(filters.typical_p(candidates(values), mass, min_keep)) == sorted(order[:kept])


@given(finite_logits, st.floats(0.1, 4))
def test_top_n_sigma_keeps_a_band_below_the_highest(values: list[float], sigmas: float) -> None:
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    border = max(values) - sigmas * deviation
    assume(all(abs(value - border) > 1e-6 for value in values if value < max(values)))
    kept = [position for position, value in enumerate(values) if value >= border]
    assert survivors(filters.top_n_sigma(candidates(values), sigmas)) == kept


@given(finite_logits, st.floats(0.01, 0.5), min_keeps, st.floats(0, 1, exclude_max=True), st.floats(0.01, 1))
def test_xtc_drops_all_top_choices_but_the_least(
    values: list[float], threshold: float, min_keep: int, coin: float, probability: float
) -> None:
    probabilities = softmax(values)
    assume(all(abs(p - threshold) > MARGIN for p in probabilities))
    order = by_falling(probabilities)
    dropped = sum(p >= threshold for p in probabilities) - 1
    if coin >= probability or dropped < 1 or len(values) - dropped < min_keep:
        dropped = 0
    result = filters.xtc(candidates(values), probability, threshold, min_keep, lambda: coin)
    assert survivors(result) == sorted(order[dropped:])


@given(finite_logits, st.floats(0.05, 5))
def test_temperature_divides(values: list[float], warmth: float) -> None:
    expected = softmax([value / warmth for value in values])
    np.testing.assert_allclose(filters.scale(candidates(values), warmth).probabilities(), expected, rtol=1e-9)


@given(finite_logits, st.floats(0.5, 3), st.floats(0.1, 0.4), st.floats(0.2, 3))
def test_dynamic_temperature_follows_the_entropy(
    values: list[float], warmth: float, spread: float, exponent: float
) -> None:
    probabilities = softmax(values)
    entropy = -math.fsum(p * math.log(p) for p in probabilities)
    share = max(entropy, 0) / math.log(len(values)) if len(values) > 1 else 0
    expected = softmax([value / (warmth - spread + 2 * spread * share**exponent) for value in values])
    result = filters.scale_by_entropy(candidates(values), warmth, spread, exponent)
    np.testing.assert_allclose(result.probabilities(), expected, rtol=1e-6, atol=1e-9)


def test_dynamic_temperature_may_reach_zero() -> None:
    result = filters.scale_by_entropy(candidates([50.0, 0.0, -50.0]), 0.5, 1.0, 1.0)
    assert result.probabilities().tolist() == [1, 0, 0]


def common_suffixes(tokens: list[int]) -> list[int]:
    """For each token, how many tokens ending there equal the end, by comparison; 0 for the last."""
    found = []
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        found.append(length)
    return [*found, 0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_repeat_lengths_are_the_common_suffixes(tokens: list[int]) -> None:
    assert repeat_lengths(np.array(tokens)) == common_suffixes(tokens)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 39), st.integers(-1, 45))
def test_dry_follows_the_text_as_it_grows(tokens: list[int], prompt: int, window: int) -> None:
    """Penalties are the same whether tokens were in the prompt or added one by one, for any window."""
    params = SamplingParams(dry_multiplier=1.0, dry_penalty_last_n=window, dry_sequence_breakers=("#",))
    dry = DryPenalty(params, tokens[:prompt], lambda token: b"x%d" % token)
    for token in tokens[prompt:]:
        dry.accept(token)
    logits = np.zeros(3, np.float32)
    dry.apply(logits)
    seen = tokens if window < 0 else tokens[max(0, len(tokens) - window) :]
    expected = np.zeros(3)
    for at, length in enumerate(common_suffixes(seen)[:-1] if seen else []):
        if length >= 2:
            expected[seen[at + 1]] = max(expected[seen[at + 1]], 1.75 ** (length - 2))
    np.testing.assert_allclose(-logits, expected, rtol=1e-5)


@pytest.mark.parametrize("multiplier", [5e-324, 1e-308, 5.9e-279, 1e-30, 100.0])
@pytest.mark.parametrize("base", [1.0, 1.0000001, 1.75, 100.0])
def test_dry_overflows_for_no_parameters(multiplier: float, base: float) -> None:
    params = SamplingParams(dry_multiplier=multiplier, dry_base=base)
    dry = DryPenalty(params, [5, 6] * 2000, lambda token: b"x")
    logits = np.zeros(8, np.float32)
    with np.errstate(all="raise"):
        dry.apply(logits)
    assert np.isfinite(logits).all()
    expected = min(math.log(multiplier) + 3996 * math.log(base), math.log(1e30))
    if expected > -80:  # otherwise below float32's precision
        assert math.log(-logits[5]) == pytest.approx(expected, abs=1e-3)


def test_counting_a_long_window_equals_sorting_it() -> None:
    window = np.random.default_rng(3).integers(0, 50, 10_000)
    parts = [np.linspace(-2, 2, 64, dtype=np.float32) for _ in range(2)]
    for logits, counted in zip(parts, (window, np.sort(window)), strict=True):
        penalise_repeats(logits, counted, 1.3, 0.5, 0.01)
    ids, counts = np.unique(window, return_counts=True)
    expected = np.linspace(-2, 2, 64, dtype=np.float32)
    expected[ids] = np.where(expected[ids] > 0, expected[ids] / 1.3, expected[ids] * 1.3) - counts * 0.01 - 0.5
    np.testing.assert_allclose(parts[0], expected, rtol=1e-5)
    assert np.array_equal(*parts)


@pytest.mark.parametrize("values", [[0.0] * 7, [5.0], [3e38, -3e38], [-3e38, -3e38]])
def test_extreme_and_equal_logits_leave_a_candidate(values: list[float]) -> None:
    start = candidates(values)
    for result in (
        filters.top_k(start, 1),
        filters.top_p(start, 0.0, 0),
        filters.min_p(start, 1.0, 0),
        filters.typical_p(start, 0.0, 0),
        filters.top_n_sigma(start, 0.1),
        filters.xtc(start, 1.0, 0.01, 0, lambda: 0.0),
        filters.scale(start, 1e-300),
        filters.scale_by_entropy(start, 0.1, 0.2, 1.0),
    ):
        assert result.ids.size >= 1
        assert result.probabilities().sum() == pytest.approx(1)
