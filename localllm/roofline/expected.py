"""The speed that a model should have here, from what was measured of this machine: nothing is run.

A decoded token waits for the bytes that it reads, a prompt for its multiply-adds. Which rates are reached depends on
format and size, so that those of the kept benchmark of the model most alike count: of the same type of weights first,
then of the nearest size. Without one, a usual share of the machine's limits counts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gguf_io import ModelFile
from localllm.roofline.kept import KeptLimits, KeptModel, kept_limits
from localllm.text import human_speed

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
    from localllm.roofline.work import work_in_header
    from models.errors import UnsupportedModelError
    from models.native_runner import MAX_ROWS

    try:
        work = work_in_header(file, kv_types)
    except UnsupportedModelError:
        return None
    read = work.decode(0, DECODED_TOKENS).read
    if read < LEAST_READ:
        return None
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
