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
    kv_bytes_per_token: f16 keys and values of all layers. suits: what it is good at, in a few words.
    """

    name: str
    architecture: str
    quantization: str
    size: int
    loaded: int
    read: int
    context: int
    kv_bytes_per_token: int
    suits: str
    licence: str = "Apache 2.0"

    @property
    def main_type(self) -> str:
        """The block format of most weights."""
        return self.quantization.removesuffix("_M")

    @property
    def memory(self) -> int:
        """Approximate bytes of the weights and a conversation of CHAT_TOKENS."""
        return self.loaded + CHAT_TOKENS * self.kv_bytes_per_token


# Best answers first, whatever memory they need. Every architecture among them runs on the CPU engine. Size, loaded and
# read are in 10^6 bytes.
_TABLE = """\
qwen3.5:35b-a3b  qwen35moe  Q4_K_M  24000  22900   2400  262144   20480  the hardest questions, quickly
gpt-oss:20b      gpt-oss    MXFP4   13800  13800   3700  131072   49152  reasoning and tools
qwen3.5:9b       qwen35     Q4_K_M   6600   5700   5200  262144   32768  reasoning, tools, code
gemma4:e4b       gemma4     Q4_K_M   9600   3800   3800  131072   57344  everyday chat, many languages
qwen3.5:4b       qwen35     Q4_K_M   3400   2800   2800  262144   32768  reasoning on small machines
granite4.1:3b    granite    Q4_K_M   2100   2100   2100  131072   81920  summaries, tools, code
qwen3.5:2b       qwen35     Q8_0     2700   2100   2100  262144   12288  short questions
qwen3:0.6b       qwen3      Q4_K_M    523    523    523   40960  114688  quick answers on any machine
"""


def _suggestion(row: str) -> Suggestion:
    name, architecture, quantization, *numbers, suits = row.split(maxsplit=8)
    size, loaded, read, context, kv_bytes = map(int, numbers)
    sizes = size * 10**6, loaded * 10**6, read * 10**6
    return Suggestion(name, architecture, quantization, *sizes, context, kv_bytes, suits)


SUGGESTIONS = tuple(map(_suggestion, _TABLE.splitlines()))


def ranked(available: int) -> list[Suggestion]:
    """The suggestions, best first; those that do not fit into `available` bytes of memory come last, smallest first."""
    fitting = [suggestion for suggestion in SUGGESTIONS if suggestion.memory <= available]
    others = [suggestion for suggestion in SUGGESTIONS if suggestion.memory > available]
    return fitting + sorted(others, key=lambda suggestion: suggestion.memory)
