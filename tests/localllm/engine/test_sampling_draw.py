"""The sampler as a whole: the draw, its reproducibility, penalties, log-probabilities and broken logits."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from localllm.engine.request import SamplingParams
from localllm.engine.sampling import LogitsError, Sampler
from localllm.errors import RequestError
from tests.localllm.engine.distribution import distribution

PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
# 99.9 % point of chi-square with 9 degrees of freedom.
CHI_SQUARE_9 = 27.88


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def sample_many(sampler: Sampler, logits: np.ndarray, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        token, _ = sampler.sample(logits)
        sampler.accept(token)
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_draws_follow_the_distribution(seed: int) -> None:
    logits = row(*np.linspace(-1, 1.5, 10))
    weights = [math.exp(float(value)) for value in logits]
    count = 5000
    seen = Counter(sample_many(Sampler(SamplingParams(**PLAIN, seed=seed), 10), logits, count))
    expected = [count * weight / sum(weights) for weight in weights]
    assert sum((seen[token] - e) ** 2 / e for token, e in enumerate(expected)) < CHI_SQUARE_9


def test_neighbouring_seeds_at_one_position_are_independent() -> None:
    logits = row(*[0.0] * 10)
    count = 5000
    seen = Counter(Sampler(SamplingParams(**PLAIN, seed=seed), 10).sample(logits)[0] for seed in range(count))
    assert sum((seen[token] - count / 10) ** 2 / (count / 10) for token in range(10)) < CHI_SQUARE_9


def test_xtc_tosses_its_coin_at_the_asked_rate_and_apart_from_the_draw() -> None:
    logits = row(2.0, 1.9, 0.0)
    sampler = Sampler(SamplingParams(**PLAIN, xtc_probability=0.3, xtc_threshold=0.1, seed=5), 3)
    best = 0
    for _ in range(3000):
        best += distribution(sampler, logits)[0] > 0
        sampler.accept(0)
    assert best / 3000 == pytest.approx(0.7, abs=4 * math.sqrt(0.3 * 0.7 / 3000))


def test_a_seed_decides_everything() -> None:
    logits = np.random.default_rng(1).normal(size=500).astype(np.float32)
    params = SamplingParams(seed=42, repeat_penalty=1.2, temperature=2.0)
    first = sample_many(Sampler(params, 500, [1, 2, 3]), logits, 50)
    assert sample_many(Sampler(params, 500, [1, 2, 3]), logits, 50) == first
    assert sample_many(Sampler(SamplingParams(seed=43, temperature=2.0), 500, [1, 2, 3]), logits, 50) != first


def test_a_recomputed_request_continues_identically() -> None:
    logits = np.random.default_rng(2).normal(size=500).astype(np.float32)
    params = SamplingParams(seed=7, temperature=2.0, presence_penalty=0.5)
    whole = sample_many(Sampler(params, 500, [4]), logits, 40)
    resumed = Sampler(params, 500, [4])
    for token in whole[:25]:
        resumed.accept(token)
    resumed.sample(logits)  # looking without accepting changes nothing
    assert sample_many(resumed, logits, 15) == whole[25:]


def test_an_unseeded_sampler_reports_a_seed_that_repeats_it() -> None:
    logits = np.random.default_rng(3).normal(size=500).astype(np.float32)
    first, second = Sampler(SamplingParams(), 500), Sampler(SamplingParams(), 500)
    assert first.seed != second.seed
    again = Sampler(SamplingParams(seed=first.seed), 500)
    assert sample_many(again, logits, 20) == sample_many(first, logits, 20)


def test_sample_draws_from_its_candidates() -> None:
    logits = row(*np.linspace(0, 2, 8))
    params = SamplingParams(seed=11, top_k=4, temperature=0.7, logit_bias={7: -1.0})
    sampler = Sampler(params, 8)
    expected = distribution(sampler, logits)
    assert expected.sum() == pytest.approx(1)
    count = 4000
    seen = Counter(sample_many(sampler, logits, count))
    for token, probability in enumerate(expected):
        spread = 4 * math.sqrt(count * probability * (1 - probability))
        assert abs(seen[token] - count * probability) <= spread


@pytest.mark.parametrize("extra", [{}, {"xtc_probability": 1.0, "typical_p": 0.5}, {"mirostat": 2}])
def test_greedy_takes_the_lowest_id_of_the_best(extra: dict[str, float]) -> None:
    sampler = Sampler(SamplingParams(temperature=0, **extra), 4)
    assert sampler.sample(row(1, 5, 5, 2))[0] == 1


def test_greedy_obeys_bias_penalties_and_mask() -> None:
    logits = row(3, 4, 5, 6)
    assert Sampler(SamplingParams(temperature=0, logit_bias={3: -math.inf}), 4).sample(logits)[0] == 2
    assert Sampler(SamplingParams(temperature=0, repeat_penalty=2.0), 4, [3, 2]).sample(logits)[0] == 1
    assert Sampler(SamplingParams(temperature=0), 4).sample(logits, np.array([True, True, False, False]))[0] == 1
    assert Sampler(SamplingParams(temperature=0), 4).sample(logits, banned=np.array([2, 3]))[0] == 1
    assert logits.tolist() == [3, 4, 5, 6]


def test_penalties_by_hand() -> None:
    params = SamplingParams(**PLAIN, repeat_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, repeat_last_n=3)
    sampler = Sampler(params, 4, [3, 1])
    sampler.accept(0)
    sampler.accept(0)  # the window is now 1, 0, 0
    weights = np.exp([2 / 2 - 1.0 - 0.25, -1 * 2 - 0.5 - 0.25, 1.0, 1.0])
    np.testing.assert_allclose(distribution(sampler, row(2, -1, 1, 1)), weights / weights.sum(), rtol=1e-6)


def test_penalties_see_everything_or_nothing() -> None:
    everything = SamplingParams(temperature=0, presence_penalty=10, repeat_last_n=-1)
    assert Sampler(everything, 2, [1] + [0] * 1000).sample(row(1, 2))[0] == 1
    assert Sampler(everything, 3, [1] + [0] * 1000).sample(row(1, 2, 0))[0] == 2
    nothing = SamplingParams(temperature=0, presence_penalty=10, repeat_last_n=0)
    assert Sampler(nothing, 2, [1]).sample(row(1, 2))[0] == 1


def test_logprobs_are_of_the_model_alone() -> None:
    logits = row(0, 2, 2, 1)
    params = SamplingParams(temperature=0, logit_bias={0: 100}, logprobs=3)
    token, logprob = Sampler(params, 4).sample(logits, np.array([True, False, True, True]))
    total = math.log(sum(math.exp(float(value)) for value in logits))
    assert token == 0
    assert logprob is not None and logprob.token_id == 0
    assert logprob.logprob == pytest.approx(-total)
    assert [rival for rival, _ in logprob.top] == [1, 2, 3]
    assert [value for _, value in logprob.top] == pytest.approx([2 - total, 2 - total, 1 - total])
    assert Sampler(SamplingParams(logprobs=0), 4).sample(logits)[1].top == ()
    assert Sampler(SamplingParams(), 4).sample(logits)[1] is None


weird = st.sampled_from([math.nan, math.inf, 3e38, -math.inf, 0.0, 0.0, 0.0, 1.0, -1.0, 9e29, -9e29, 1e-40])
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.8, 100.0]),
    dynatemp_range=st.sampled_from([0.0, 0.5]),
    top_k=st.sampled_from([-1, 0, 1, 3]),
    top_p=st.sampled_from([0.0, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.5, 1.0]),
    typical_p=st.sampled_from([0.0, 0.5, 1.0]),
    top_n_sigma=st.sampled_from([-1.0, 0.5]),
    xtc_probability=st.sampled_from([0.0, 1.0]),
    min_keep=st.sampled_from([0, 1, 4]),
    repeat_penalty=st.sampled_from([0.5, 1.0, 2.0]),
    dry_multiplier=st.sampled_from([0.0, 100.0]),
    mirostat=st.sampled_from([0, 2]),
    logprobs=st.sampled_from([None, 2]),
    seed=st.just(1),
)


@given(arrays(np.float32, 6, elements=weird), arrays(np.bool_, 6), any_params)
def test_weird_logits_give_an_allowed_token_or_a_clear_error(
    logits: np.ndarray, allowed: np.ndarray, params: SamplingParams
) -> None:
    sampler = Sampler(params, 6, [1, 2, 3, 1, 2], lambda token: b"x%d" % token)
    broken = np.isnan(logits).any() or (logits > 1e30).any()
    possible = np.isfinite(logits) & allowed
    if broken or not possible.any():
        error, match = (LogitsError, "computed a logit") if broken else (RequestError, "No token is allowed")
        with pytest.raises(error, match=match):
            sampler.sample(logits, allowed)
        return
    for _ in range(3):
        token, _ = sampler.sample(logits, allowed)
        assert possible[token]
        assert params.temperature == 0 or distribution(sampler, logits, allowed)[~possible].sum() == 0
        sampler.accept(token)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        Sampler(SamplingParams(), 4).sample(row(1, 2))
    with pytest.raises(ValueError, match="token_text"):
        Sampler(SamplingParams(dry_multiplier=1), 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_beyond_32_bits_is_a_large_one(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logit_bias={5: 1e39, 6: -1e39}, seed=1)
    token, _ = Sampler(params, 8).sample(np.zeros(8, np.float32))
    assert token == 5


@pytest.mark.parametrize(
    "more",
    [
        {"top_k": 3},
        {"logit_bias": {2: 3.0, 4: -math.inf}},
        {"repeat_penalty": 1.4, "min_p": 0.05},
        {"mirostat": 2, "mirostat_tau": 2.0},
        {"watermark_key": "mine", "watermark_delta": 2.0},
    ],
    ids=lambda more: next(iter(more)),
)
def test_log_probabilities_after_sampling(more: dict[str, object]) -> None:
    """They are those of the distribution that the tokens are drawn from, whose sum is one."""
    logits = np.random.default_rng(3).normal(size=40).astype(np.float32)
    params = SamplingParams(**PLAIN | {"seed": 11} | more, logprobs=40, post_sampling_probs=True)
    sampler = Sampler(params, 40, [2, 7])
    for _ in range(5):
        wanted = distribution(sampler, logits)
        token, told = sampler.sample(logits)
        assert told is not None and told.token_id == token
        assert math.exp(told.logprob) == pytest.approx(wanted[token])
        assert {one: pytest.approx(wanted[one]) for one, _ in told.top} == {o: math.exp(v) for o, v in told.top}
        assert [value for _, value in told.top] == sorted((value for _, value in told.top), reverse=True)
        assert sum(math.exp(value) for _, value in told.top) == pytest.approx(1)
        sampler.accept(token)


def test_log_probabilities_after_sampling_at_temperature_0_are_certain() -> None:
    params = SamplingParams(temperature=0, logit_bias={1: 5.0}, logprobs=3, post_sampling_probs=True)
    token, told = Sampler(params, 3).sample(row(2.0, 1.0, 0.0))
    assert token == 1 and told is not None and told.logprob == 0 and told.top == ((1, 0.0),)
