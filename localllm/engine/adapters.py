"""Which LoRA adapters a request is computed with, and how prefixes of different ones are told apart."""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

from localllm.errors import RequestError, SettingsError

# Adapters by number, each with its weight; ascending, none with weight 0. The same type as gpu_offload.adapters'.
AdapterSet = tuple[tuple[int, float], ...]

_TOKEN_BITS = 64  # ids of images have more bits than those of tokens
_ENTRY = struct.Struct("<If")
LARGEST_SCALE = 1e3


def parse_lora(text: str) -> list[tuple[Path, float]]:
    """Files and weights of the setting: FILE or FILE:WEIGHT, separated by commas. Raises SettingsError."""
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        path, colon, tail = item.rpartition(":")
        try:
            scale = float(tail) if colon else None
        except ValueError:  # the colon belongs to the path
            scale = None
        if scale is not None and not (path and abs(scale) <= LARGEST_SCALE):
            raise SettingsError(f"lora: {item!r} should be FILE or FILE:WEIGHT, the weight within ±{LARGEST_SCALE:g}.")
        found.append((Path(item if scale is None else path).expanduser(), 1.0 if scale is None else scale))
    return found


def adapter_set(chosen: Sequence[tuple[int, float]], count: int) -> AdapterSet:
    """Order what a request chose of `count` adapters. Raises RequestError for numbers or weights that cannot be."""
    weights = dict(chosen)
    if len(weights) < len(chosen):
        raise RequestError("An adapter is named twice.")
    for number, scale in weights.items():
        if not 0 <= number < count:
            there_are = f"there are 0 to {count - 1}" if count else "the model was loaded without any (--lora)"
            raise RequestError(f"There is no adapter {number}: {there_are}.")
        if not math.isfinite(scale) or abs(scale) > LARGEST_SCALE:
            raise RequestError(f"The weight of adapter {number} is {scale}; it should be within ±{LARGEST_SCALE:g}.")
    return tuple((number, scale) for number, scale in sorted(weights.items()) if scale)


def marked(tokens: list[int], adapters: AdapterSet, namespace: str = "") -> list[int]:
    """Tokens as a key for prefixes under other than the usual adapters, or in a namespace, so that no two share any.

    The first token carries both: numbers and weights and the name, exact and not hashed, are the bits above a token's.
    """
    if not tokens:
        return tokens
    entries = b"".join(_ENTRY.pack(*entry) for entry in adapters)
    mark = int.from_bytes(b"\x01" + len(adapters).to_bytes(4) + entries + namespace.encode())
    return [tokens[0] | mark << _TOKEN_BITS, *tokens[1:]]
