"""The sampling parameters that settings, chats, models' parameters and requests of every protocol have in common."""

from dataclasses import dataclass, fields

LARGEST_LORA_WEIGHT = 1e3
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CommonSampling:
    """Names, defaults and order are llama.cpp's; temperature 0 is greedy, seed None or negative draws a random one.

    Where there is a watermark_key, watermark_delta is added to the logits of a share of the tokens, watermark_gamma.
    """

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 1
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    typical_p: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    watermark_delta: float = 2.0
    watermark_gamma: float = 0.25
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """A parameter's valid range, both ends included. The ends are finite, so NaN and infinity are outside."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"between {self.low} and {self.high}"


RANGES: dict[str, Range] = {
    "temperature": Range(0, 100),
    "dynatemp_range": Range(0, 100),
    "dynatemp_exponent": Range(0, 100),
    "top_k": Range(-1, _MAX_COUNT),
    "top_p": Range(0, 1),
    "min_p": Range(0, 1),
    "typical_p": Range(0, 1),
    "top_n_sigma": Range(-1, 1000),
    "xtc_probability": Range(0, 1),
    "xtc_threshold": Range(0, 1),
    "min_keep": Range(0, _MAX_COUNT),
    "repeat_penalty": Range(0.01, 100),
    "repeat_last_n": Range(-1, _MAX_COUNT),
    "presence_penalty": Range(-100, 100),
    "frequency_penalty": Range(-100, 100),
    "dry_multiplier": Range(0, 100),
    "dry_base": Range(1, 100),
    "dry_allowed_length": Range(1, _MAX_COUNT),
    "dry_penalty_last_n": Range(-1, _MAX_COUNT),
    "mirostat": Range(0, 2),
    "mirostat_tau": Range(0, 100),
    "mirostat_eta": Range(0, 1),
    "watermark_delta": Range(0, 100),
    "watermark_gamma": Range(0.01, 0.99),
    "seed": Range(-(2**63), 2**64 - 1),
}

MEANINGS = {
    "temperature": "0 always picks the likeliest token; higher values vary more",
    "dynatemp_range": "temperature varies by this much with the entropy of the prediction; 0 is off",
    "dynatemp_exponent": "how temperature follows the entropy",
    "top_k": "keep the N likeliest tokens; 0 is off",
    "top_p": "keep the likeliest tokens up to this probability (nucleus sampling); 1 is off",
    "min_p": "minimum probability relative to the top token; 0 is off",
    "top_n_sigma": "keep tokens within N standard deviations of the top logit; -1 is off",
    "xtc_probability": "probability of removing all likely tokens but the least likely of them (XTC); 0 is off",
    "xtc_threshold": "probability from which XTC counts a token as likely",
    "min_keep": "tokens that the filters keep at least",
    "repeat_penalty": "above 1 avoids repetition; 1 is off",
    "repeat_last_n": "window of the penalties in tokens; -1 is the whole context, 0 is off",
    "presence_penalty": "penalty for tokens that occurred; 0 is off",
    "frequency_penalty": "penalty for each occurrence; 0 is off",
    "dry_multiplier": "strength of DRY, which avoids repeated passages; 0 is off",
    "dry_base": "how fast DRY's penalty grows with the length of the passage",
    "dry_allowed_length": "longest repetition in tokens that DRY does not penalise",
    "dry_penalty_last_n": "window of DRY in tokens; -1 is the whole context, 0 is off",
    "typical_p": "locally typical sampling; 1 is off",
    "mirostat": "2 turns Mirostat on; 1 runs as 2; 0 is off",
    "mirostat_tau": "Mirostat's target entropy in bits",
    "mirostat_eta": "Mirostat's learning rate",
    "watermark_delta": "what marked tokens' logits get if there is a watermark_key",
    "watermark_gamma": "share of tokens that a watermark marks",
    "seed": "makes answers reproducible; negative for a random one",
}
"""What each parameter does, for help and documentation."""

COMMON = tuple(field.name for field in fields(CommonSampling))
ALIASES = {"repetition_penalty": "repeat_penalty"}
"""Other programs' names of parameters: vLLM's and SGLang's."""
