"""The sampling parameters that settings, chats and requests have in common."""

from dataclasses import dataclass, fields

LARGEST_LORA_WEIGHT = 1e3


@dataclass(frozen=True, slots=True)
class CommonSampling:
    """Names, defaults and order are llama.cpp's; temperature 0 is greedy, seed None draws a random one."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    typical_p: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None


COMMON = tuple(field.name for field in fields(CommonSampling))
