"""What can go wrong with models on this machine and on their way to it."""

from localllm.errors import LocalLLMError


class LibraryError(LocalLLMError):
    """The store of models cannot do what was asked: a bad name, a damaged manifest, a folder that cannot be written."""


class ModelNotFoundError(LibraryError):
    """No model of this name is on this machine. The message says how to get it."""


class PullError(LibraryError):
    """A model did not arrive. What arrived so far is kept where it can be trusted, and the next pull goes on there."""
