"""Errors of the model library, and warnings that a process logs only once."""

import logging
from functools import lru_cache

from localllm.errors import LocalLLMError

log = logging.getLogger(__name__)


class LibraryError(LocalLLMError):
    """An operation of the model store failed: a bad name, a damaged manifest, a folder that cannot be written."""


class ModelNotFoundError(LibraryError):
    """No model of this name is on this machine. missing: the message without a full stop; advice: how to get it."""

    def __init__(self, missing: str, advice: str) -> None:
        super().__init__(f"{missing}. {advice}")
        self.missing = missing

    def cannot_be_pulled(self, why: LibraryError) -> "PullError":
        """The error to raise after a pull of the model has failed too."""
        return PullError(f"{self.missing}, and it cannot be pulled: {why} `localllm list` shows the models there are.")


class PullError(LibraryError):
    """A pull failed. What arrived intact is kept, and the next pull resumes there."""


class PushError(LibraryError):
    """A push failed. Blobs that have arrived whole are not sent again by the next push."""


@lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """Log a warning unless this process has logged the same before."""
    log.warning("%s", message)


def unreadable_folder(error: OSError) -> None:
    """Warn that a folder of models exists and cannot be read, such as one of another user."""
    warn_once(f"{error.filename}: cannot be read: {error.strerror}. Models there are left out.")
