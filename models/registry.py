"""The architectures that the native engine computes, by `general.architecture`."""

from models import (
    cohere2,
    ernie4_5,
    exaone,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4,
    gpt_oss,
    granite,
    granitemoe,
    hunyuan_dense,
    internlm2,
    llama,
    minicpm,
    mistral3,
    olmo2,
    olmoe,
    phi2,
    phi3,
    qwen2,
    qwen2moe,
    qwen3,
    qwen3moe,
    seed_oss,
    smollm3,
    starcoder2,
)
from models.architecture import Architecture
from models.errors import UnsupportedModelError

_MODULES = (
    *(llama, mistral3, smollm3, internlm2, minicpm, granite, granitemoe),
    *(qwen2, qwen2moe, qwen3, qwen3moe, hunyuan_dense, ernie4_5, glm4, seed_oss),
    *(gemma, gemma2, gemma3, phi2, phi3, olmo2, olmoe, gpt_oss, cohere2, starcoder2, exaone, exaone4),
)
ARCHITECTURES: dict[str, Architecture] = {module.ARCHITECTURE.name: module.ARCHITECTURE for module in _MODULES}


def find_architecture(name: str) -> Architecture:
    """Return the architecture of that name.

    Raises UnsupportedModelError otherwise; the llama.cpp backend may still take it.
    """
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"The native engine does not compute the architecture '{name}' (it knows {known}). "
            f"The llama.cpp backend will take it: use --backend llama."
        )
    return ARCHITECTURES[name]
