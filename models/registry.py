"""The architectures that the native engine computes, by `general.architecture`."""

from importlib import import_module

from gguf_io.errors import shortened
from models.architecture import Architecture
from models.errors import UnsupportedModelError
from models.scan_sizes import SCANS

# Each is the file of that name in models/architectures, with _ for -.
_NAMES = """
    bailingmoe2 cohere2 deepseek2 ernie4_5 ernie4_5-moe exaone exaone4 falcon-h1 gemma gemma2 gemma3 gemma3n gemma4
    glm4 glm4moe gpt-oss granite granitehybrid granitemoe hunyuan-dense hunyuan-moe internlm2 lfm2 lfm2moe llama mamba2
    minicpm mistral3 nemotron_h nemotron_h_moe olmo2 olmoe phi2 phi3 qwen2 qwen2moe qwen3 qwen35 qwen35moe qwen3moe
    qwen3next qwen3vl qwen3vlmoe seed_oss smallthinker smollm3 starcoder2
"""
_ENCODER_NAMES = "bert gemma-embedding modern-bert nomic-bert"
_ONLY_WRITING = (*SCANS, "qwen35", "qwen35moe", "qwen3next")  # an encoder has no slots for their states


def _load(names: str) -> dict[str, Architecture]:
    return {
        name: import_module(f"models.architectures.{name.replace('-', '_')}").ARCHITECTURE for name in names.split()
    }


ARCHITECTURES: dict[str, Architecture] = _load(_NAMES)
"""Those that write text."""
TEXT_ENCODERS: dict[str, Architecture] = {
    name: one for name, one in ARCHITECTURES.items() if name not in _ONLY_WRITING
} | _load(_ENCODER_NAMES)
"""Those whose states can be pooled: of the former, too."""


def find_architecture(name: str, among: dict[str, Architecture] = ARCHITECTURES) -> Architecture:
    """Return the architecture of that name.

    Raises UnsupportedModelError otherwise; the llama.cpp backend may still take it.
    """
    if name not in among:
        raise UnsupportedModelError(
            f"The native engine does not support the architecture '{shortened(name)}' (it supports "
            f"{', '.join(among)}). The llama.cpp backend may: use --backend llama."
        )
    return among[name]
