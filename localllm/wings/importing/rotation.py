"""RoPE scaling: the ways to stretch a rotation, as GGUF keys and tensors of factors."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.text import shortened
from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError

Keys = dict[str, Any]
_STILL = 1e30  # a frequency's divisor that stops its rotation


def scaling_keys(
    rope: Config, keys: Keys, sharpening: float | None, *, truncated: bool
) -> tuple[Keys, dict[str, NDArray[np.float32]]]:
    """Keys and tensors of factors of a RoPE scaling. sharpening, truncated: see Family. Raises CheckpointError."""
    kind = rope.values.get("rope_type", rope.values.get("type")) or "default"
    context, size = keys["context_length"], keys["rope.dimension_count"]
    if kind == "dynamic" and "alpha" in rope.values:  # Hunyuan's, which does not depend on the length
        return {"rope.freq_base": keys["rope.freq_base"] * math.pow(rope.number("alpha"), size / (size - 2))}, {}
    if kind in ("default", "dynamic", "mrope"):  # the usual dynamic scaling starts beyond the trained context
        return {}, {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.number("factor")}, {}
    original = rope.whole("original_max_position_embeddings", context)
    if kind == "yarn":
        rope.expect("truncate", True, truncated)
        multiplier: Keys = {}
        if sharpening is not None:
            rope.expect("attention_factor")
            if "mscale_all_dim" in rope.values:
                rope.expect("mscale", rope.number("mscale_all_dim"))
                multiplier = {"rope.scaling.yarn_log_multiplier": sharpening * rope.number("mscale_all_dim")}
        else:
            rope.expect("mscale")
            rope.expect("mscale_all_dim")
            if rope.values.get("attention_factor") is not None:  # replaces YaRN's own, which multiplies GGUF's factor
                own = 1.0 + 0.1 * math.log(max(rope.number("factor"), 1.0))
                multiplier = {"rope.scaling.attn_factor": rope.number("attention_factor") / own}
        return {
            **multiplier,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope.number("factor"),
            "rope.scaling.original_context_length": original,
            "rope.scaling.yarn_beta_fast": rope.number("beta_fast", 32.0),
            "rope.scaling.yarn_beta_slow": rope.number("beta_slow", 1.0),
        }, {}
    if kind in ("llama3", "proportional"):
        of_pairs = _llama3_factors if kind == "llama3" else _proportional_factors
        return {}, {"rope_freqs.weight": of_pairs(rope, keys["rope.freq_base"], size, original)}
    if kind == "longrope":
        scale = context / original
        spread = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        tensors = {f"rope_factors_{name}.weight": np.array(rope.numbers(f"{name}_factor"), np.float32)
                   for name in ("long", "short")}  # fmt: skip
        return {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": rope.number("attention_factor", spread),
        }, tensors
    raise CheckpointError(f"{rope.where}: RoPE scaling of the type {shortened(str(kind))!r} cannot be imported.")


def _llama3_factors(rope: Config, base: float, size: int, original: int) -> NDArray[np.float32]:
    """Low frequencies are divided by the factor, high ones are unchanged, with a ramp in between (Llama 3.1)."""
    factor = rope.number("factor", 8.0)
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    turns = original * base ** (-np.arange(0, size, 2) / size) / (2 * math.pi)
    smooth = np.clip((turns - low) / max(high - low, 1e-9), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


def _proportional_factors(rope: Config, _base: float, size: int, _original: int) -> NDArray[np.float32]:
    """Only the first pairs of a head are rotated (Gemma 4)."""
    factors = np.full(size // 2, _STILL, np.float32)
    factors[: int(rope.number("partial_rotary_factor", 1.0) * size / 2)] = 1.0
    return factors
