"""The order in which candidates are narrowed: llama.cpp's default."""

from collections.abc import Callable
from functools import partial

from localllm.engine.request import SamplingParams
from localllm.engine.sampling import filters, temperature
from localllm.engine.sampling.candidates import Candidates

Filter = Callable[[Candidates], Candidates]


def build_filters(params: SamplingParams, coin: Callable[[], float]) -> list[Filter]:
    """Return the filters whose parameters are not neutral, temperature last. coin() is uniform in [0, 1)."""
    keep = params.min_keep
    chain: list[tuple[bool, Filter]] = [
        (params.top_n_sigma > 0, partial(filters.top_n_sigma, sigmas=params.top_n_sigma)),
        (params.top_k > 0, partial(filters.top_k, count=params.top_k)),
        (params.typical_p < 1, partial(filters.typical_p, mass=params.typical_p, min_keep=keep)),
        (params.top_p < 1, partial(filters.top_p, mass=params.top_p, min_keep=keep)),
        (params.min_p > 0, partial(filters.min_p, share=params.min_p, min_keep=keep)),
        (
            params.xtc_probability > 0,
            partial(
                filters.xtc,
                probability=params.xtc_probability,
                threshold=params.xtc_threshold,
                min_keep=keep,
                coin=coin,
            ),
        ),
        (True, build_temperature(params)),
    ]
    return [step for active, step in chain if active]


def build_temperature(params: SamplingParams) -> Filter:
    """Return the temperature step for a temperature above 0."""
    if params.dynatemp_range > 0:
        return partial(
            temperature.scale_by_entropy,
            temperature=params.temperature,
            spread=params.dynatemp_range,
            exponent=params.dynatemp_exponent,
        )
    return partial(temperature.scale, temperature=params.temperature)
