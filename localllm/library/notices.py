"""Warnings that a long-running process gives once, however often it looks."""

import logging
from functools import lru_cache

log = logging.getLogger(__name__)


@lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """Log a warning unless this process has logged the same before."""
    log.warning("%s", message)
