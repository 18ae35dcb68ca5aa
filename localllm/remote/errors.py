"""What can go wrong between us and somebody else's server."""

from gguf_io.errors import LocalLLMError

__all__ = ["RemoteError"]


class RemoteError(LocalLLMError):
    """A server cannot be reached, refuses, or breaks off. The message names its address and its own words."""
