"""Model architectures: from a GGUF file's metadata to the steps that compute the next token's logits."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.native_runner import NativeRunner

__all__ = ["NativeRunner"]


def __getattr__(name: str) -> Any:
    """Import the runner, and with it the compiler, on first access."""
    if name == "NativeRunner":
        from models.native_runner import NativeRunner

        return NativeRunner
    raise AttributeError(f"module 'models' has no attribute '{name}'")
