"""The sampling parameters that settings, chats, models' parameters and requests of every protocol have in common."""

from dataclasses import dataclass, fields

LARGEST_LORA_WEIGHT = 1e3


@dataclass(frozen=True, slots=True)
class CommonSampling:
    """Names, defaults and order are llama.cpp's; temperature 0 is greedy, seed None or negative draws a random one."""

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
    seed: int | None = None


COMMON = tuple(field.name for field in fields(CommonSampling))
ALIASES = {"repetition_penalty": "repeat_penalty"}
"""Other programs' names of parameters: vLLM's and SGLang's."""
