"""The LoRA adapters that a request is computed with, and which requests share keys and values."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from localllm.errors import RequestError
from localllm.settings import LARGEST_LORA_WEIGHT

# Adapters by number, each with its weight; ascending, none with weight 0. The same type as gpu_offload.adapters'.
AdapterSet = tuple[tuple[int, float], ...]


class KeySpace(NamedTuple):
    """Requests of one space share keys and values of common prefixes. Those of different spaces never do."""

    adapters: AdapterSet = ()
    namespace: str = ""


def adapter_set(chosen: Sequence[tuple[int, float]], count: int) -> AdapterSet:
    """Order what a request chose of `count` adapters. Raises RequestError for unknown numbers and unusable weights."""
    weights = dict(chosen)
    if len(weights) < len(chosen):
        raise RequestError("An adapter is named twice.")
    for number, scale in weights.items():
        if not 0 <= number < count:
            there_are = f"there are 0 to {count - 1}" if count else "the model was loaded without any (--lora)"
            raise RequestError(f"There is no adapter {number}: {there_are}.")
        if not math.isfinite(scale) or abs(scale) > LARGEST_LORA_WEIGHT:
            raise RequestError(
                f"The weight of adapter {number} is {scale}; it must be within ±{LARGEST_LORA_WEIGHT:g}."
            )
    return tuple((number, scale) for number, scale in sorted(weights.items()) if scale)
