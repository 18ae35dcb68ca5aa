"""The architectures that the native engine computes, by `general.architecture`."""

from models import gemma2, gemma3, llama, phi3, qwen2, qwen3, qwen3moe
from models.architecture import Architecture
from models.errors import UnsupportedModelError

ARCHITECTURES: dict[str, Architecture] = {
    module.ARCHITECTURE.name: module.ARCHITECTURE for module in (llama, qwen2, qwen3, qwen3moe, phi3, gemma2, gemma3)
}


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
