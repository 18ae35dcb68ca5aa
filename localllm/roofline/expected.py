"""The speed that a model should have here, from what was measured of this machine: nothing is run.

A decoded token waits for the bytes that it reads, a prompt for its multiply-adds. Which rates are reached depends on
the weight format. Where kept benchmarks have measured every format of a model, its speed is put together from them.
Else the rate of the model most alike counts: of the same type of weights first, then of the nearest size. Without one,
a usual share of the machine's limits counts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gguf_io import ModelFile
from localllm.roofline.formats import FormatRates
from localllm.roofline.kept import KeptLimits, KeptModel, kept_limits
from localllm.text import human_speed

if TYPE_CHECKING:
    from models.needs import NativeNeeds

PROMPT_TOKENS, DECODED_TOKENS = 512, 64  # as `localllm bench` measures without flags
# Shares of the limits where no model was measured: the middle of those that the documentation's benchmarks reach.
USUAL_DECODE, USUAL_PREFILL = 0.75, 0.45
# What a token reads of smaller models may lie in a cache, of which these limits say nothing.
LEAST_READ = 64 << 20
# How far off an expectation may be, by the factor between the bytes a token of two models of the same type of weights.
ALIKE_FACTOR, AKIN_FACTOR = 1.5, 4.0
ALIKE_ERROR, AKIN_ERROR, OTHER_ERROR = 0.15, 0.3, 0.5


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """Tokens a second at a short context; prefill of a prompt of 512.

    error: how far off it may be, as a share. basis: the benchmark that it rests on, in words.
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
    """What the native engine should reach, from a model's header.

    None for a model that it does not compute, and for one so small that it may lie in a cache.
    """
    # These take a moment, and lists that expect nothing need none of them.
    from localllm.roofline.work import work_of
    from models.errors import UnsupportedModelError
    from models.native_runner import MAX_ROWS
    from models.needs import native_needs

    try:
        needs = native_needs(file, kv_types)
    except UnsupportedModelError:
        return None
    work = work_of(file, needs)
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
    """Seconds that the native engine should take for a prompt; None where nothing is known of model or machine.

    To what a short prompt takes comes attention, whose products grow with the square of the length.
    """
    kept = kept_limits(threads)
    expected = expected_speed(file, kept) if kept else None
    if kept is None or expected is None:
        return None
    from localllm.roofline.work import attention_operations

    return tokens / expected.prefill + attention_operations(file, tokens) / (USUAL_PREFILL * kept.floats)


def expect_decode(threads: int | None) -> Callable[[ModelFile], float | None]:
    """A function from a model's header to the tokens a second that decoding should reach here, None where not known.

    threads: of the settings.
    """
    kept = kept_limits(threads)

    def speed(file: ModelFile) -> float | None:
        expected = expected_speed(file, kept) if kept else None
        return None if expected is None else expected.decode

    return speed


def expected_decode(read: float, weights: str, kept: KeptLimits) -> tuple[float, str]:
    """Tokens a second of a model of which a token reads so many bytes, most of them of this type, and the basis."""
    model = _most_alike(read, weights, kept)
    if model is None:
        return USUAL_DECODE * kept.read / read, "this machine's limits"
    return model.read_rate / read, f"the bench of {model.name}"


def main_type(file: ModelFile) -> str:
    """The type that holds most bytes of a model's weights."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name], default="")


def _by_formats(needs: "NativeNeeds", read: float, kept: KeptLimits) -> ExpectedSpeed | None:
    """The speed by each format's rate in the model of nearest size that has it; None where one was never measured."""
    measured = [model for model in kept.models if model.rates]
    measured.sort(key=lambda model: abs(math.log(model.read / read)))
    read_rates: dict[str, float] = {}
    compute_rates: dict[str, float] = {}
    used: list[KeptModel] = []
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


def _most_alike(read: float, weights: str, kept: KeptLimits) -> KeptModel | None:
    def distance(model: KeptModel) -> tuple[bool, float]:
        return model.format != weights, abs(math.log(model.read / read))

    return min(kept.models, key=distance, default=None)


def _error(read: float, weights: str, model: KeptModel | None) -> float:
    if model is None:
        return OTHER_ERROR
    factor = max(model.read / read, read / model.read) if model.format == weights else math.inf
    error = ALIKE_ERROR if factor <= ALIKE_FACTOR else AKIN_ERROR if factor <= AKIN_FACTOR else OTHER_ERROR
    return max(error, model.deviation)
