"""The architectures that the native engine computes, by `general.architecture`."""

from importlib import import_module

from gguf_io.errors import shortened
from models.architecture import Architecture
from models.errors import UnsupportedModelError

# Each is the file of that name in models/architectures, with _ for -.
_NAMES = """
    bailingmoe2 cohere2 ernie4_5 ernie4_5-moe exaone exaone4 gemma gemma2 gemma3 glm4 glm4moe gpt-oss granite
    granitemoe hunyuan-dense hunyuan-moe internlm2 lfm2 lfm2moe llama minicpm mistral3 olmo2 olmoe phi2 phi3 qwen2
    qwen2moe qwen3 qwen3moe qwen3vl qwen3vlmoe seed_oss smollm3 starcoder2
"""
ARCHITECTURES: dict[str, Architecture] = {
    name: import_module(f"models.architectures.{name.replace('-', '_')}").ARCHITECTURE for name in _NAMES.split()
}


def find_architecture(name: str) -> Architecture:
    """Return the architecture of that name.

    Raises UnsupportedModelError otherwise; the llama.cpp backend may still take it.
    """
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"The native engine does not support the architecture '{shortened(name)}' (it supports "
            f"{', '.join(ARCHITECTURES)}). The llama.cpp backend may: use --backend llama."
        )
    return ARCHITECTURES[name]
