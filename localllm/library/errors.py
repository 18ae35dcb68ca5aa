"""Errors of the model library, and warnings that a long-running process gives once."""

import logging
from functools import lru_cache

from localllm.errors import LocalLLMError

log = logging.getLogger(__name__)


class LibraryError(LocalLLMError):
    """The model store cannot do what was asked: a bad name, a damaged manifest, a folder that cannot be written."""


class ModelNotFoundError(LibraryError):
    """No model of this name is on this machine. missing: the message without a full stop; advice: how to get it."""

    def __init__(self, missing: str, advice: str) -> None:
        super().__init__(f"{missing}. {advice}")
        self.missing = missing

    def cannot_be_pulled(self, why: LibraryError) -> "PullError":
        """The same after a pull was tried."""
        return PullError(f"{self.missing}, and it cannot be pulled: {why}")


class PullError(LibraryError):
    """A model did not arrive. What arrived is kept where it can be trusted; the next pull resumes there."""


@lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """Log a warning unless this process has logged the same before."""
    log.warning("%s", message)
