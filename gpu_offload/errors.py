"""Errors of llama.cpp and its devices."""

from gguf_io.errors import LocalLLMError
from gpu_offload.builds import processor_command


class LlamaCppError(LocalLLMError):
    """llama.cpp refused a model, a context or a step. The message ends with llama.cpp's own."""


class LlamaCppMemoryError(LlamaCppError):
    """The model or its context did not fit into a device's memory, or the KV cache has no room for a step's tokens."""


class DeviceRequestError(LocalLLMError):
    """A setting names a GPU or a worker that does not exist or does not answer."""


class LlamaCppMissingError(LocalLLMError):
    """llama-cpp-python is not installed or does not run here. The message says how to install it here."""

    def __init__(self, reason: str, command: str | None = None) -> None:
        """command: the command that fixes it, if not one of the usual installation commands."""
        self.reason = reason
        if command:
            super().__init__(f"llama.cpp cannot do that ({reason}). Install it again:\n  {command}")
            return
        super().__init__(
            f"llama.cpp is not available ({reason}). Install it for this machine's GPU with `localllm gpu install`, or "
            f"for the processor alone with: {processor_command()}"
        )
