"""Good models for somebody who has none yet, of families that the CPU engine runs.

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

    read: about how many of the bytes a decoded token reads, of a mixture of experts those of the chosen ones.
    main_type: of most weights. kv_bytes_per_token counts f16 keys and values of all layers. suits: what it is good at,
    in a few words.
    """

    name: str
    architecture: str
    quantization: str
    main_type: str
    size: int
    read: int
    context: int
    kv_bytes_per_token: int
    suits: str
    licence: str

    @property
    def memory(self) -> int:
        """About how many bytes the weights and a conversation of CHAT_TOKENS take."""
        return self.size + CHAT_TOKENS * self.kv_bytes_per_token


def _q4_k_m(
    name: str, architecture: str, size: float, context: int, kv_bytes: int, suits: str, licence: str, read: float = 0
) -> Suggestion:
    """size and read in 10^9 bytes; a dense model reads all of it."""
    sizes = round(size * 1e9), round((read or size) * 1e9)
    return Suggestion(name, architecture, "Q4_K_M", "Q4_K", *sizes, context, kv_bytes, suits, licence)


# The best first: by how well they answer, whatever they need. Every architecture among them runs on the CPU engine.
SUGGESTIONS = (
    _q4_k_m("qwen3:30b", "qwen3moe", 18.6, 262_144, 98_304, "the hardest questions, quickly", "Apache 2.0", read=2.0),
    Suggestion(
        "gpt-oss:20b",
        "gpt-oss",
        "MXFP4",
        "MXFP4",
        13_800_000_000,
        3_700_000_000,
        131_072,
        49_152,
        "reasoning and tools",
        "Apache 2.0",
    ),
    _q4_k_m("ministral-3:8b", "mistral3", 6.0, 262_144, 139_264, "everyday chat, many languages", "Apache 2.0"),
    _q4_k_m("qwen3:8b", "qwen3", 5.2, 40_960, 147_456, "mathematics and code", "Apache 2.0"),
    _q4_k_m("qwen3:4b", "qwen3", 2.5, 262_144, 147_456, "reasoning on small machines", "Apache 2.0"),
    _q4_k_m("granite4.1:3b", "granite", 2.1, 131_072, 81_920, "summaries, tools, code", "Apache 2.0"),
    _q4_k_m("gemma3:1b", "gemma3", 0.815, 32_768, 26_624, "short chat and writing", "Gemma terms"),
    _q4_k_m("qwen3:0.6b", "qwen3", 0.523, 40_960, 114_688, "quick answers on any machine", "Apache 2.0"),
)


def ranked(available: int) -> list[Suggestion]:
    """The suggestions, the best first; those that do not fit into so many bytes of memory come last, smallest first."""
    fitting = [suggestion for suggestion in SUGGESTIONS if suggestion.memory <= available]
    others = [suggestion for suggestion in SUGGESTIONS if suggestion.memory > available]
    return fitting + sorted(others, key=lambda suggestion: suggestion.memory)
