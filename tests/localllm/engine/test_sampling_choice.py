"""The compiled choice of a token against its definition in NumPy: the same candidates, and the same token."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cpu_kernels.choosing import MANY
from localllm.engine.request import SamplingParams
from localllm.engine.sampling import LogitsError
from localllm.engine.sampling.choice import Chooser
from localllm.errors import RequestError
from tests.localllm.engine.sampling_oracle import expected

NEUTRAL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "seed": 1}
SIZES = (1, 2, 15, 16, 17, 300, MANY - 1, MANY, MANY + 17, 40_000)
KINDS = (
    *("flat", "peaked", "ties", "equal", "wide", "extreme", "two levels", "outlier", "tail"),
    *("half precision", "spikes", "spikes in the sample", "far below 0", "far above 0"),
)


def made(kind: str, size: int, impossible: float = 0.0, seed: int = 0) -> NDArray[np.float32]:
    """Logits of a kind, of which a share is impossible."""
    random = np.random.default_rng(seed)
    normal = random.normal(size=size)
    values = {
        "flat": normal,
        "peaked": 4 * normal,
        "ties": np.round(3 * normal),
        "equal": np.full(size, -3.25),
        "wide": 40 * normal,
        "extreme": random.choice([0.0, 1e-40, -1e-40, 1.0, -1.0, 9e29, -9e29, 30.0], size),
        "two levels": np.where(random.random(size) < 0.01, 5.0, 0.0),
        "outlier": np.where(np.arange(size) == size // 3, 50.0, normal),
        "tail": 10 * random.exponential(size=size),
        "half precision": normal.astype(np.float16),  # many at the border are equal
        "spikes": normal + 14 * (np.arange(size) % 1531 == 40),  # hardly any in a sample of vectors
        "spikes in the sample": normal + 14 * (np.arange(size) == 3),
        "far below 0": normal - 4000,
        "far above 0": 2 * normal + 20_000,
    }[kind].astype(np.float32)
    values[random.random(size) < impossible] = -np.inf
    values[size // 2] = max(values[size // 2], np.float32(-1))
    return values


def check(
    params: SamplingParams, logits: NDArray[np.float32], allowed: Any = None, numbers: Any = (0.3719287365, 0.2)
) -> None:
    uniform, coin = numbers
    wanted = expected(params, logits, allowed, coin)
    chooser = Chooser(params, logits.size)
    token = chooser.choose(logits, allowed, uniform, coin, 2 * params.mirostat_tau if params.mirostat else None)
    candidates = chooser.candidates(logits)
    assert candidates.ids.tolist() == wanted.ids.tolist()
    assert token == wanted.draw(uniform)
    np.testing.assert_allclose(candidates.probabilities, wanted.probabilities(), rtol=1e-9, atol=1e-300)


ALONE: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "lowest temperature": {"temperature": 1e-30},
    "highest temperature": {"temperature": 100.0},
    "dynamic temperature": {"dynatemp_range": 0.5, "dynatemp_exponent": 0.7},
    "top-k 1": {"top_k": 1},
    "top-k 40": {"top_k": 40},
    "top-k 9000": {"top_k": 9000},
    "top-p 0": {"top_p": 0.0},
    "top-p 0.5": {"top_p": 0.5},
    "top-p 0.95": {"top_p": 0.95},
    "top-p 0.9999": {"top_p": 0.9999},
    "top-p and the fewest": {"top_p": 0.1, "min_keep": 500},
    "min-p 0.05": {"min_p": 0.05},
    "min-p 1": {"min_p": 1.0, "min_keep": 20},
    "typical 0": {"typical_p": 0.0, "min_keep": 0},
    "typical 0.6": {"typical_p": 0.6},
    "typical and the fewest": {"typical_p": 0.2, "min_keep": 100},
    "top-n-sigma": {"top_n_sigma": 1.5},
    "XTC 0.1": {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    "XTC 0.00001": {"xtc_probability": 1.0, "xtc_threshold": 1e-5},
    "XTC 0": {"xtc_probability": 0.5, "xtc_threshold": 0.0},
    "Mirostat": {"mirostat": 2},
    "strict Mirostat": {"mirostat": 2, "mirostat_tau": 0.5, "temperature": 0.8},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ALONE)
def test_each_option_alone(way: str, kind: str) -> None:
    for size in (2, 17, 300, MANY - 1, 20_000):
        for impossible in (0.0, 0.6):
            check(SamplingParams(**NEUTRAL | ALONE[way]), made(kind, size, impossible))


@given(st.data())
def test_any_options_together(data: st.DataObject) -> None:
    params = data.draw(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([1e-30, 0.1, 0.8, 1.0, 3.0, 100.0]),
            dynatemp_range=st.sampled_from([0.0, 0.5]),
            top_k=st.sampled_from([-1, 0, 1, 3, 40, 1000, 9000]),
            top_p=st.sampled_from([0.0, 0.9, 1.0]) | st.floats(0, 1),
            min_p=st.sampled_from([0.0, 0.05, 1.0]),
            typical_p=st.sampled_from([0.0, 1.0, 1.0]) | st.floats(0, 1),
            top_n_sigma=st.sampled_from([-1.0, 0.5, 2.0]),
            xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
            xtc_threshold=st.sampled_from([0.0, 1e-5, 0.01, 0.1, 0.5, 0.6]),
            min_keep=st.sampled_from([0, 1, 4, 100, 10_000]),
            mirostat=st.sampled_from([0, 0, 0, 2]),
            seed=st.just(1),
        )
    )
    size, kind = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from(KINDS))
    logits = made(kind, size, data.draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])), data.draw(st.integers(0, 1000)))
    allowed = None
    if data.draw(st.booleans()):
        allowed = np.random.default_rng(1).random(size) < 0.4
        allowed[size // 2] = True
    # Round numbers are not drawn: they may lie exactly between two tokens, where rounding decides.
    numbers = np.random.default_rng(data.draw(st.integers(0, 1000))).random(2)
    check(params, logits, allowed, numbers)


@pytest.mark.parametrize("size", SIZES)
def test_temperature_0_takes_the_first_of_the_highest(size: int) -> None:
    logits = made("ties", size)
    chooser = Chooser(SamplingParams(temperature=0.0), size)
    assert chooser.choose(logits, None, 0.5, 0.5) == logits.argmax()
    allowed = logits < logits.max()
    if allowed.any():
        highest = np.flatnonzero(logits == logits[allowed].max())[0]
        assert chooser.choose(logits, allowed, 0.5, 0.5) == highest


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("broken", [math.nan, math.inf, 1e31])
def test_broken_logits_are_found_anywhere(size: int, broken: float) -> None:
    for position in {0, size // 2, size - 1}:
        logits = made("flat", size)
        logits[position] = broken
        with pytest.raises(LogitsError, match="computed a logit"):
            Chooser(SamplingParams(), size).choose(logits, None, 0.5, 0.5)


def test_no_possible_token_is_an_error() -> None:
    impossible = np.full(100, -np.inf, np.float32)
    for params in (SamplingParams(), SamplingParams(temperature=0.0)):
        with pytest.raises(RequestError, match="No token is allowed"):
            Chooser(params, 100).choose(impossible, None, 0.5, 0.5)
        with pytest.raises(RequestError, match="No token is allowed"):
            Chooser(params, 100).choose(made("flat", 100), np.zeros(100, np.bool_), 0.5, 0.5)


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("size", SIZES)
def test_no_impossible_token_is_drawn(size: int, uniform: float) -> None:
    """A weight of 0 is never drawn, whatever the sums are rounded to."""
    logits = made("flat", size) - np.float32(2000)
    logits[size // 3] = 5
    assert Chooser(SamplingParams(**NEUTRAL), size).choose(logits, None, uniform, 0.5) == size // 3


def test_vocabularies_of_several_sizes_share_memory() -> None:
    choosers = {size: Chooser(SamplingParams(**NEUTRAL | {"top_p": 0.9}), size) for size in (300, 40_000, 17)}
    for _ in range(2):
        for size, chooser in choosers.items():
            logits = made("flat", size)
            wanted = expected(SamplingParams(**NEUTRAL | {"top_p": 0.9}), logits, None, 0.5)
            assert chooser.choose(logits, None, 0.4, 0.5) == wanted.draw(0.4)


@pytest.mark.parametrize("off", [-1e-10, 1e-10])
@pytest.mark.parametrize("name", ["top_p", "typical_p"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.95])
@pytest.mark.parametrize("kind", ["peaked", "flat"])
def test_shares_that_are_hardly_reached(kind: str, name: str, share: float, off: float) -> None:
    """Single precision could not tell whether the last token belongs to those that are kept."""
    for seed in range(10):
        logits = made(kind, 20_000, seed=seed)
        probabilities = np.exp(logits.astype(np.float64) - logits.max())
        probabilities /= probabilities.sum()
        surprises = -np.log(probabilities)
        distances = surprises if name == "top_p" else np.abs(surprises - probabilities @ surprises)
        order = np.argsort(distances, kind="stable")
        masses = np.cumsum(probabilities[order])
        last = int(np.searchsorted(masses, share))
        params = SamplingParams(**NEUTRAL | {name: float(masses[last] * (1 + off))})
        chooser = Chooser(params, logits.size)
        chooser.choose(logits, None, 0.5, 0.5)
        assert chooser.candidates(logits).ids.tolist() == np.sort(order[: last + (1 if off < 0 else 2)]).tolist()


def probabilities_of(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


@pytest.mark.parametrize("off", [-1e-10, 1e-10])
@pytest.mark.parametrize("kind", ["peaked", "two levels", "outlier", "flat", "far below 0"])
def test_draws_beside_the_border_of_two_tokens(kind: str, off: float) -> None:
    logits = made(kind, 20_000)
    chooser = Chooser(SamplingParams(**NEUTRAL), logits.size)
    probabilities = probabilities_of(logits)
    masses = np.cumsum(probabilities)
    for token in np.argsort(-probabilities)[:20]:
        uniform = float(masses[token] + off)
        if 0 < uniform < 1:
            assert chooser.choose(logits, None, uniform, 0.5) == masses.searchsorted(uniform, side="right")


@pytest.mark.parametrize("off", [-1e-9, 1e-9])
def test_xtc_with_a_threshold_that_is_hardly_reached(off: float) -> None:
    logits = made("peaked", 20_000)
    probabilities = probabilities_of(logits)
    order = np.argsort(-probabilities)
    threshold = float(probabilities[order[5]] * (1 + off))
    chooser = Chooser(SamplingParams(**NEUTRAL, xtc_probability=1.0, xtc_threshold=threshold), logits.size)
    chooser.choose(logits, None, 0.5, 0.5)
    dropped = order[: 5 if off < 0 else 4]
    assert chooser.candidates(logits).ids.tolist() == np.setdiff1d(np.arange(logits.size), dropped).tolist()


@pytest.mark.parametrize("kind", ["flat", "peaked", "wide", "equal", "spikes", "far below 0", "far above 0"])
def test_the_sum_of_all_weights_in_single_precision(kind: str) -> None:
    """Its error is within the bound by which draws and filters decide whether they need double precision."""
    for size in (MANY, 20_000, 100_003):
        logits = made(kind, size)
        chooser = Chooser(SamplingParams(**NEUTRAL), size, total=True)
        chooser.choose(logits, None, 0.5, 0.5)
        wanted = math.log(np.exp(logits.astype(np.float64) - logits.max()).sum()) + float(logits.max())
        assert chooser.log_total == pytest.approx(wanted, rel=1e-14, abs=2.4e-7)


@pytest.mark.parametrize("offset", [0, 300])
@pytest.mark.parametrize("deviation", [0.2, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("way", ["top-p 0.5", "top-p 0.95", "typical 0.6"])
def test_many_random_logits_keep_what_sorting_keeps(way: str, deviation: float, offset: int) -> None:
    """Far from 0, neighbouring floats are further apart, so that many are equal and others hardly differ."""
    for seed in range(8):
        logits = made("flat", 20_000 + 7 * seed, seed=100 + seed) * np.float32(deviation) + np.float32(offset)
        check(SamplingParams(**NEUTRAL | ALONE[way]), logits)


@pytest.mark.parametrize("share", [0.05, 0.3678794411714423, 0.5, 0.9])
def test_min_p_with_logits_next_to_its_bound(share: float) -> None:
    """The bound is a double between two floats, or one of them."""
    for size in (40, MANY + 40):
        logits = made("flat", size) - np.float32(10)
        logits[5] = 0
        near = np.float32(math.log(share))
        for number in range(6):
            logits[20 + number] = near
            near = np.nextafter(near, np.float32(-1 if number % 2 else 0))
        logits[30:33] = np.nextafter(np.float32(math.log(share)), np.float32([-20, 0, 0]))
        check(SamplingParams(**NEUTRAL | {"min_p": share}), logits)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 600, MANY, MANY + 300])
def test_a_logit_is_found_at_either_end_of_a_block(size: int) -> None:
    """Blocks without a candidate are read once only; the last one may be shorter."""
    for place in {at for at in (0, 15, 255, 256, 511, size // 256 * 256 - 1, size - 1) if 0 <= at < size}:
        logits = made("flat", size)
        logits[place] = 12
        if size > 1:
            logits[place - 1] = -np.inf if size % 2 else 11
        for change in ({"temperature": 0.0}, {"top_k": 40}, {"min_p": 0.2}, {"top_n_sigma": 1.0}, {"mirostat": 2}):
            params = SamplingParams(**NEUTRAL | change)
            if params.temperature:
                check(params, logits)
            else:
                assert Chooser(params, size).choose(logits, None, 0.5, 0.5) == place
        logits[place] = np.nan
        with pytest.raises(LogitsError):
            Chooser(SamplingParams(**NEUTRAL), size).choose(logits, None, 0.5, 0.5)
