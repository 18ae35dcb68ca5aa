"""The sampling parameters that settings, chats, models' parameters and requests of every protocol have in common."""

from dataclasses import dataclass, field, fields
from typing import Any

LARGEST_LORA_WEIGHT = 1e3
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """A parameter's valid range, both ends included. The ends are finite, so NaN and infinity are outside."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"between {self.low} and {self.high}"


def _parameter(default: Any, low: float, high: float, meaning: str) -> Any:
    """A field with its range and its meaning, for help and documentation."""
    return field(default=default, metadata={"range": Range(low, high), "meaning": meaning})


@dataclass(frozen=True)
class Temperature:
    """How flat the distribution is from which a token is drawn."""

    temperature: float = _parameter(0.8, 0, 100, "0 always picks the likeliest token; higher values vary more")
    dynatemp_range: float = _parameter(
        0.0, 0, 100, "temperature varies by this much with the entropy of the prediction; 0 is off"
    )
    dynatemp_exponent: float = _parameter(1.0, 0, 100, "how temperature follows the entropy")


@dataclass(frozen=True)
class Filters:
    """Which tokens may be drawn."""

    top_k: int = _parameter(40, -1, _MAX_COUNT, "keep the N likeliest tokens; 0 is off")
    top_p: float = _parameter(
        0.95, 0, 1, "keep the likeliest tokens up to this probability (nucleus sampling); 1 is off"
    )
    min_p: float = _parameter(0.05, 0, 1, "minimum probability relative to the top token; 0 is off")
    typical_p: float = _parameter(1.0, 0, 1, "locally typical sampling; 1 is off")
    top_n_sigma: float = _parameter(
        -1.0, -1, 1000, "keep tokens within N standard deviations of the top logit; -1 is off"
    )
    xtc_probability: float = _parameter(
        0.0, 0, 1, "probability of removing all likely tokens but the least likely of them (XTC); 0 is off"
    )
    xtc_threshold: float = _parameter(0.1, 0, 1, "probability from which XTC counts a token as likely")
    min_keep: int = _parameter(1, 0, _MAX_COUNT, "tokens that the filters keep at least")


@dataclass(frozen=True)
class Penalties:
    """What tokens lose that have occurred, alone or in a passage that would be repeated (DRY)."""

    repeat_penalty: float = _parameter(1.0, 0.01, 100, "above 1 avoids repetition; 1 is off")
    repeat_last_n: int = _parameter(
        64, -1, _MAX_COUNT, "window of the penalties in tokens; -1 is the whole context, 0 is off"
    )
    presence_penalty: float = _parameter(0.0, -100, 100, "penalty for tokens that occurred; 0 is off")
    frequency_penalty: float = _parameter(0.0, -100, 100, "penalty for each occurrence; 0 is off")
    dry_multiplier: float = _parameter(0.0, 0, 100, "strength of DRY, which avoids repeated passages; 0 is off")
    dry_base: float = _parameter(1.75, 1, 100, "how fast DRY's penalty grows with the length of the passage")
    dry_allowed_length: int = _parameter(2, 1, _MAX_COUNT, "longest repetition in tokens that DRY does not penalise")
    dry_penalty_last_n: int = _parameter(
        -1, -1, _MAX_COUNT, "window of DRY in tokens; -1 is the whole context, 0 is off"
    )


@dataclass(frozen=True)
class Mirostat:
    """A filter that is adjusted after each token until the text has a wanted entropy."""

    mirostat: int = _parameter(0, 0, 2, "2 turns Mirostat on; 1 runs as 2; 0 is off")
    mirostat_tau: float = _parameter(5.0, 0, 100, "Mirostat's target entropy in bits")
    mirostat_eta: float = _parameter(0.1, 0, 1, "Mirostat's learning rate")


@dataclass(frozen=True)
class CommonSampling(Mirostat, Penalties, Filters, Temperature):  # fields begin with those of the last class
    """Names and defaults are llama.cpp's; temperature 0 is greedy, seed None or negative draws a random one.

    Where there is a watermark_key, watermark_delta is added to the logits of a share of the tokens, watermark_gamma.
    """

    watermark_delta: float = _parameter(2.0, 0, 100, "what marked tokens' logits get if there is a watermark_key")
    watermark_gamma: float = _parameter(0.25, 0.01, 0.99, "share of tokens that a watermark marks")
    seed: int | None = _parameter(None, -(2**63), 2**64 - 1, "makes answers reproducible; negative for a random one")


COMMON = tuple(parameter.name for parameter in fields(CommonSampling))
RANGES: dict[str, Range] = {parameter.name: parameter.metadata["range"] for parameter in fields(CommonSampling)}
MEANINGS: dict[str, str] = {parameter.name: parameter.metadata["meaning"] for parameter in fields(CommonSampling)}
ALIASES = {"repetition_penalty": "repeat_penalty"}
"""Other programs' names of parameters: vLLM's and SGLang's."""
