"""Bringing a model that is not here, as the first part of loading it."""

from time import monotonic

from localllm.cli.pull import Meter
from localllm.library.entry import LibraryModel
from localllm.library.errors import LibraryError, ModelNotFoundError
from localllm.library.lookup import find
from localllm.library.pull import PullStatus, pull
from localllm.settings import Settings
from tui.backend import LoadProgress


def find_or_pull(name: str, settings: Settings, progress: LoadProgress) -> LibraryModel:
    """The model that a name stands for. Raises LibraryError, and what progress raises to stop; what came is kept."""
    meter = Meter()

    def told(status: PullStatus) -> None:
        if status.total:
            progress(f"pulling {name}, {meter.detail(status, monotonic())}", status.completed / status.total)
        else:
            progress(f"asking for {name}", 0.0)

    try:
        return find(name, settings)
    except ModelNotFoundError as error:
        missing = error
    try:
        return pull(name, settings, told)
    except LibraryError as error:
        raise missing.cannot_be_pulled(error) from error
