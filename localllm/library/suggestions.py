"""Good small models for somebody who has none yet.

Written down by hand and asked of nobody, so that the list is there offline: sizes are about those of the files in
Ollama's library, which may change under the same name, and licences are named as the models' cards name them. Bytes of
keys and values are layers * KV heads * head size * 2 * 2, from the models' published configurations.
"""

from dataclasses import dataclass

# Keys and values of so many tokens count towards the memory that a model needs: a conversation of some length.
CHAT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A model to pull by its name. size: about how many bytes come and stay; context: tokens it was trained for.

    kv_bytes_per_token counts f16 keys and values of all layers. suits: what it is good at, in a few words.
    """

    name: str
    quantization: str
    size: int
    context: int
    kv_bytes_per_token: int
    suits: str
    licence: str

    @property
    def memory(self) -> int:
        """About how many bytes the weights and a conversation of CHAT_TOKENS take."""
        return self.size + CHAT_TOKENS * self.kv_bytes_per_token


# Smallest first. Every architecture among them runs on the CPU engine.
SUGGESTIONS = (
    Suggestion("qwen3:0.6b", "Q4_K_M", 523_000_000, 40_960, 114_688, "quick answers on any machine", "Apache 2.0"),
    Suggestion("gemma3:1b", "Q4_K_M", 815_000_000, 32_768, 26_624, "everyday chat and writing", "Gemma terms"),
    Suggestion("qwen2.5-coder:1.5b", "Q4_K_M", 986_000_000, 32_768, 28_672, "code in small pieces", "Apache 2.0"),
    Suggestion("llama3.2:3b", "Q4_K_M", 2_000_000_000, 131_072, 114_688, "summaries of long texts", "Llama 3.2 terms"),
    Suggestion("phi4-mini:3.8b", "Q4_K_M", 2_500_000_000, 131_072, 131_072, "mathematics and logic", "MIT"),
    Suggestion("qwen3:4b", "Q4_K_M", 2_500_000_000, 262_144, 147_456, "reasoning, many languages", "Apache 2.0"),
    Suggestion("qwen3:8b", "Q4_K_M", 5_200_000_000, 40_960, 147_456, "the hardest questions of these", "Apache 2.0"),
)
