"""Every parameter outside its range is refused by name."""

import math
from dataclasses import fields

import pytest

from localllm.engine.request import MAX_LOGPROBS, SamplingParams, validate
from localllm.errors import RequestError
from localllm.sampling import RANGES, Range
from localllm.settings import Settings

BOUNDS = {**RANGES, "logprobs": Range(0, MAX_LOGPROBS)}


def test_the_defaults_and_the_ends_of_each_range_are_valid() -> None:
    validate(SamplingParams(), 10)
    validate(SamplingParams(logit_bias={0: -math.inf, 9: 1000}), 10)
    for name, bounds in BOUNDS.items():
        validate(SamplingParams(**{name: bounds.low}), 10)
        validate(SamplingParams(**{name: bounds.high}), 10)


def test_every_number_has_a_range() -> None:
    others = {"logit_bias", "dry_sequence_breakers", "watermark_key", "post_sampling_probs"}
    assert {field.name for field in fields(SamplingParams)} == BOUNDS.keys() | others


@pytest.mark.parametrize("name", sorted(BOUNDS))
@pytest.mark.parametrize("beyond", ["below", "above", "nan", "infinite", "huge"])
def test_values_outside_are_refused_with_the_name_and_range(name: str, beyond: str) -> None:
    bounds = BOUNDS[name]
    value = {
        "below": bounds.low - 1,
        "above": bounds.high + 1,
        "nan": math.nan,
        "infinite": math.inf,
        "huge": 10**400,
    }[beyond]
    with pytest.raises(RequestError, match=rf"^{name} is .*between {bounds.low} and {bounds.high}\.$"):
        validate(SamplingParams(**{name: value}), 10)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logit_bias={10: 1.0}), "logit_bias names token 10; ids of this model run from 0 to 9"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias names token -1"),
        (SamplingParams(logit_bias={1: math.nan}), "logit_bias of token 1 is nan"),
        (SamplingParams(logit_bias={1: math.inf}), "logit_bias of token 1 is inf"),
        (SamplingParams(dry_sequence_breakers=("\n", "")), "dry_sequence_breakers holds an empty string"),
        (SamplingParams(dry_sequence_breakers=("x",) * 65), "at most 64 strings of at most 256"),
        (SamplingParams(dry_sequence_breakers=("x" * 257,)), "at most 64 strings of at most 256"),
    ],
)
def test_other_refusals(params: SamplingParams, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        validate(params, 10)


def test_the_settings_name_the_sampler_s_parameters_as_it_does() -> None:
    settings = Settings(temperature=0.3, top_k=7, top_p=0.5, min_p=0.1, repeat_penalty=1.2, seed=5)
    expected = SamplingParams(temperature=0.3, top_k=7, top_p=0.5, min_p=0.1, repeat_penalty=1.2, seed=5, logprobs=2)
    assert SamplingParams.of(settings, logprobs=2) == expected
