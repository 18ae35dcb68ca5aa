"""What can go wrong between us and somebody else's server."""

from gguf_io.errors import LocalLLMError

__all__ = ["RemoteError"]


class RemoteError(LocalLLMError):
    """A server cannot be reached, refuses, or breaks off. The message names its address and its own words.

    status is the HTTP status that it refused with, None for everything else.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)
