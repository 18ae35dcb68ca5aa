"""The error for a folder of safetensors that cannot be imported."""

from localllm.errors import LocalLLMError


class CheckpointError(LocalLLMError):
    """A folder that cannot be imported. Says which file, what was wrong with it, and what to do."""
