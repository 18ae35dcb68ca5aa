"""What can go wrong with models on this machine and on their way to it."""

from localllm.errors import LocalLLMError


class LibraryError(LocalLLMError):
    """The store of models cannot do what was asked: a bad name, a damaged manifest, a folder that cannot be written."""


class ModelNotFoundError(LibraryError):
    """No model of this name is on this machine. missing says so without an end, advice how to get it."""

    def __init__(self, missing: str, advice: str) -> None:
        super().__init__(f"{missing}. {advice}")
        self.missing = missing

    def cannot_be_pulled(self, why: LibraryError) -> "PullError":
        """The same where a pull was tried."""
        return PullError(f"{self.missing}, and it cannot be pulled: {why}")


class PullError(LibraryError):
    """A model did not arrive. What arrived so far is kept where it can be trusted, and the next pull goes on there."""
