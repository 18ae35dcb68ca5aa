"""Bringing a model that is not here, as the first part of loading it."""

from time import monotonic

from localllm.cli.pull import Meter
from localllm.library import pull
from localllm.library.entry import LibraryModel
from localllm.library.pull import PullStatus
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

    return pull.find_or_pull(name, settings, told)
