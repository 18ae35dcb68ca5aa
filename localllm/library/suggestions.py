"""Good first models for a new user, of families that the CPU engine runs.

Maintained by hand, so that the list is available offline. Sizes are approximately those of the files in Ollama's
library, which may change under the same name; licences are those of the model cards. Bytes of keys and values are
layers * KV heads * head size * 2 * 2, from the models' published configurations.
"""

from dataclasses import dataclass

# Tokens whose keys and values count towards the memory that a model needs: a conversation of some length.
CHAT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A model to pull by its name. size: approximate bytes to download; context: tokens it was trained for.

    loaded: approximate bytes that the CPU engine loads: vision, audio, and embeddings that are read token by token stay
    in the file. read: approximate bytes read per decoded token; for a mixture of experts, of the chosen ones only.
    main_type: of most weights. kv_bytes_per_token: f16 keys and values of all layers. suits: what it is good at, in a
    few words.
    """

    name: str
    architecture: str
    quantization: str
    main_type: str
    size: int
    loaded: int
    read: int
    context: int
    kv_bytes_per_token: int
    suits: str
    licence: str

    @property
    def memory(self) -> int:
        """Approximate bytes of the weights and a conversation of CHAT_TOKENS."""
        return self.loaded + CHAT_TOKENS * self.kv_bytes_per_token


def _of(
    quantization: str,
    name: str,
    architecture: str,
    size: float,
    context: int,
    kv_bytes: int,
    suits: str,
    licence: str,
    *,
    loaded: float = 0,
    read: float = 0,
) -> Suggestion:
    """size, loaded and read in 10^9 bytes; loaded defaults to size, read to loaded."""
    loaded = loaded or size
    return Suggestion(
        name,
        architecture,
        quantization,
        main_type=quantization.removesuffix("_M"),
        size=round(size * 1e9),
        loaded=round(loaded * 1e9),
        read=round((read or loaded) * 1e9),
        context=context,
        kv_bytes_per_token=kv_bytes,
        suits=suits,
        licence=licence,
    )


_Q4, _Q8, _APACHE = "Q4_K_M", "Q8_0", "Apache 2.0"
# Best answers first, whatever memory they need. Every architecture among them runs on the CPU engine.
SUGGESTIONS = (
    _of(
        *(_Q4, "qwen3.5:35b-a3b", "qwen35moe", 24.0, 262_144, 20_480, "the hardest questions, quickly", _APACHE),
        loaded=22.9,
        read=2.4,
    ),
    _of("MXFP4", "gpt-oss:20b", "gpt-oss", 13.8, 131_072, 49_152, "reasoning and tools", _APACHE, read=3.7),
    _of(_Q4, "qwen3.5:9b", "qwen35", 6.6, 262_144, 32_768, "reasoning, tools, code", _APACHE, loaded=5.7, read=5.2),
    _of(_Q4, "gemma4:e4b", "gemma4", 9.6, 131_072, 57_344, "everyday chat, many languages", _APACHE, loaded=3.8),
    _of(_Q4, "qwen3.5:4b", "qwen35", 3.4, 262_144, 32_768, "reasoning on small machines", _APACHE, loaded=2.8),
    _of(_Q4, "granite4.1:3b", "granite", 2.1, 131_072, 81_920, "summaries, tools, code", _APACHE),
    _of(_Q8, "qwen3.5:2b", "qwen35", 2.7, 262_144, 12_288, "short questions", _APACHE, loaded=2.1),
    _of(_Q4, "qwen3:0.6b", "qwen3", 0.523, 40_960, 114_688, "quick answers on any machine", _APACHE),
)


def ranked(available: int) -> list[Suggestion]:
    """The suggestions, best first; those that do not fit into `available` bytes of memory come last, smallest first."""
    fitting = [suggestion for suggestion in SUGGESTIONS if suggestion.memory <= available]
    others = [suggestion for suggestion in SUGGESTIONS if suggestion.memory > available]
    return fitting + sorted(others, key=lambda suggestion: suggestion.memory)
