"""Predicts a model's speed on this machine from stored benchmarks, without running it.

Decoding is bound by the bytes read per token, prefill by its multiply-adds. The rates reached depend on the weight
format. If stored benchmarks have measured every format of a model, its speed is computed from their rates. Otherwise
the rate of the most similar benchmarked model is used: same main weight type first, then nearest size. Without any, a
typical share of the machine's limits is used.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gguf_io import ModelFile
from localllm.speed.formats import FormatRates
from localllm.speed.kept import KeptLimits, KeptSpeed, kept_limits
from localllm.text import human_speed
from models.errors import UnsupportedModelError
from models.kv_layout import MAX_ROWS

if TYPE_CHECKING:
    from models.needs import NativeNeeds

PROMPT_TOKENS, DECODED_TOKENS = 512, 64  # as `localllm bench` measures without flags
# Shares of the limits if no model was measured: mid-range values of the documentation's benchmarks.
USUAL_DECODE, USUAL_PREFILL = 0.75, 0.45
# Minimum bytes read per token: the weights of smaller models may stay in a CPU cache, which these limits do not cover.
LEAST_READ = 64 << 20
# Error bounds of a prediction, by the ratio of bytes read per token to a benchmarked model with the same weight type.
ALIKE_FACTOR, AKIN_FACTOR = 1.5, 4.0
ALIKE_ERROR, AKIN_ERROR, OTHER_ERROR = 0.15, 0.3, 0.5


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """Tokens per second at a short context; prefill for a prompt of 512 tokens.

    error: the relative error bound. basis: describes the benchmark behind the prediction.
    """

    decode: float
    prefill: float
    error: float
    basis: str

    def __str__(self) -> str:
        speeds = f"{human_speed(self.decode)} tok/s decode, {human_speed(self.prefill)} tok/s prefill"
        return f"about {speeds} (within {self.error:.0%}, from {self.basis})"


def expected_speed(
    file: ModelFile, kept: KeptLimits, kv_types: tuple[str, str] = ("f16", "f16")
) -> ExpectedSpeed | None:
    """The speed that the native engine should reach, from a model's header.

    None for an unsupported model, and for one so small that it may stay in a CPU cache.
    """
    # Slow imports, not needed by lists without stored benchmarks.
    from localllm.speed.work import work_in_header
    from models.needs import native_needs

    try:
        needs = native_needs(file, kv_types)
    except UnsupportedModelError:
        return None
    work = work_in_header(file, kv_types)
    read = work.decode(0, DECODED_TOKENS).read
    if read < LEAST_READ:
        return None
    if (together := _by_formats(needs, read, kept)) is not None:
        return together
    weights = main_type(file)
    model = _most_alike(read, weights, kept)
    decode, basis = expected_decode(read, weights, kept)
    int8, floats = USUAL_PREFILL * kept.int8, USUAL_PREFILL * kept.floats
    if model and model.int8_rate and model.floats_rate:
        int8, floats = model.int8_rate, model.floats_rate
    prompt = work.prefill(PROMPT_TOKENS, MAX_ROWS)
    return ExpectedSpeed(decode, 1 / (prompt.int8 / int8 + prompt.floats / floats), _error(read, weights, model), basis)


def expected_prompt_s(file: ModelFile, tokens: int, threads: int | None) -> float | None:
    """Seconds that the native engine should take for a prompt; None if model or machine are unknown.

    Adds attention, whose cost grows with the square of the length, to the per-token time of a short prompt.
    """
    kept = kept_limits(threads)
    expected = expected_speed(file, kept) if kept else None
    if kept is None or expected is None:
        return None
    from localllm.speed.work import attention_operations

    return tokens / expected.prefill + attention_operations(file, tokens) / (USUAL_PREFILL * kept.floats)


def expect_decode(threads: int | None) -> Callable[[ModelFile], float | None]:
    """A function that predicts decoding speed in tokens per second from a model's header; None if unknown.

    threads: as in the settings.
    """
    kept = kept_limits(threads)

    def speed(file: ModelFile) -> float | None:
        expected = expected_speed(file, kept) if kept else None
        return None if expected is None else expected.decode

    return speed


def expected_decode(read: float, weights: str, kept: KeptLimits) -> tuple[float, str]:
    """Tokens per second for a model that reads `read` bytes per token, mostly of type `weights`; and the basis."""
    model = _most_alike(read, weights, kept)
    if model is None:
        return USUAL_DECODE * kept.read / read, "this machine's limits"
    return model.read_rate / read, f"the bench of {model.name}"


def main_type(file: ModelFile) -> str:
    """The tensor type that holds the most bytes of a model's weights."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name], default="")


def _by_formats(needs: "NativeNeeds", read: float, kept: KeptLimits) -> ExpectedSpeed | None:
    """The speed from each format's rate in the nearest-sized model that has it; None if a format was not measured."""
    measured = [model for model in kept.models if model.rates]
    measured.sort(key=lambda model: abs(math.log(model.read / read)))
    read_rates: dict[str, float] = {}
    compute_rates: dict[str, float] = {}
    used: list[KeptSpeed] = []
    wanted = {*needs.row, *needs.logits}
    for model in measured:
        assert model.rates is not None
        if new := (wanted & model.rates.read.keys()) - read_rates.keys():
            used.append(model)
            read_rates |= {name: model.rates.read[name] for name in new}
        for name in needs.row.keys() & model.rates.compute.keys():
            compute_rates.setdefault(name, model.rates.compute[name])
    nearest = measured[0].rates if measured else None
    if nearest is None or wanted - read_rates.keys() or needs.row.keys() - compute_rates.keys():
        return None
    rates = FormatRates(read_rates, compute_rates, nearest.step, nearest.row)
    return ExpectedSpeed(
        decode=1 / rates.decode_seconds(needs),
        prefill=PROMPT_TOKENS / rates.prefill_seconds(needs, PROMPT_TOKENS),
        error=max(ALIKE_ERROR, *(model.deviation for model in used)),
        basis="the bench of " + " and ".join(model.name for model in used),
    )


def _most_alike(read: float, weights: str, kept: KeptLimits) -> KeptSpeed | None:
    def distance(model: KeptSpeed) -> tuple[bool, float]:
        return model.format != weights, abs(math.log(model.read / read))

    return min(kept.models, key=distance, default=None)


def _error(read: float, weights: str, model: KeptSpeed | None) -> float:
    if model is None:
        return OTHER_ERROR
    factor = max(model.read / read, read / model.read) if model.format == weights else math.inf
    error = ALIKE_ERROR if factor <= ALIKE_FACTOR else AKIN_ERROR if factor <= AKIN_FACTOR else OTHER_ERROR
    return max(error, model.deviation)
