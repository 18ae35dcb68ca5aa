"""The ranges of sampling parameters."""

import math
from dataclasses import dataclass

from localllm.engine.request import SamplingParams
from localllm.errors import RequestError

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 128
MAX_COUNT = 2**31 - 1
MAX_BREAKERS, MAX_BREAKER_LENGTH = 64, 256


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a parameter may have, both ends included. The ends are finite: NaN and infinity are outside."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value lies in the range."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"between {self.low} and {self.high}"


RANGES: dict[str, Range] = {
    "temperature": Range(0, 100),
    "dynatemp_range": Range(0, 100),
    "dynatemp_exponent": Range(0, 100),
    "top_k": Range(-1, MAX_COUNT),
    "top_p": Range(0, 1),
    "min_p": Range(0, 1),
    "typical_p": Range(0, 1),
    "top_n_sigma": Range(-1, 1000),
    "xtc_probability": Range(0, 1),
    "xtc_threshold": Range(0, 1),
    "min_keep": Range(0, MAX_COUNT),
    "repeat_penalty": Range(0.01, 100),
    "repeat_last_n": Range(-1, MAX_COUNT),
    "presence_penalty": Range(-100, 100),
    "frequency_penalty": Range(-100, 100),
    "dry_multiplier": Range(0, 100),
    "dry_base": Range(1, 100),
    "dry_allowed_length": Range(1, MAX_COUNT),
    "dry_penalty_last_n": Range(-1, MAX_COUNT),
    "mirostat": Range(0, 2),
    "mirostat_tau": Range(0, 100),
    "mirostat_eta": Range(0, 1),
    "seed": Range(0, MAX_SEED),
    "logprobs": Range(0, MAX_LOGPROBS),
}


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError, naming the field, its value and its range, unless every parameter is valid."""
    check_ranges(params)
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"logit_bias names token {token_id}; ids of this model run from 0 to {vocab_size - 1}.")
        if math.isnan(bias) or bias == math.inf:
            raise RequestError(
                f"logit_bias of token {token_id} is {bias}; it must be finite, or -inf to ban the token."
            )


def check_ranges(params: SamplingParams) -> None:
    """The part of `validate` that needs no model, so that front ends can refuse a request before loading one."""
    for name, bounds in RANGES.items():
        value = getattr(params, name)
        if value is not None and not bounds.holds(value):
            raise RequestError(f"{name} is {value}; it must be {bounds}.")
    if params.mirostat == 1:
        raise RequestError("mirostat is 1; it must be 0 (off) or 2. Version 1 is superseded by version 2.")
    breakers = params.dry_sequence_breakers
    if "" in breakers:
        raise RequestError("dry_sequence_breakers holds an empty string; each must have at least one character.")
    if len(breakers) > MAX_BREAKERS or any(len(breaker) > MAX_BREAKER_LENGTH for breaker in breakers):
        raise RequestError(
            f"dry_sequence_breakers may hold at most {MAX_BREAKERS} strings of at most {MAX_BREAKER_LENGTH} characters."
        )
