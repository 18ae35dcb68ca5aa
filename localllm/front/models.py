"""Finding a model by name, pulling it if it is missing, and loading it with its own settings and the user's."""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from localllm.answer.local import LocalModel
from localllm.errors import RequestError
from localllm.library.behaviour import Behaviour, behaviour_of
from localllm.library.entry import LibraryModel
from localllm.library.errors import LibraryError, ModelNotFoundError
from localllm.library.lookup import find
from localllm.library.places import Places
from localllm.placement.loaded_model import load_model
from localllm.settings import Settings, sessions_path
from localllm.text import human_bytes, human_time

if TYPE_CHECKING:
    from gguf_io.runner_info import LoadProgress
    from localllm.library.pull import PullStatus

# The speed is an average over these last seconds, so that a stall shows.
WINDOW_S = 5.0


class PullMeter:
    """Formats pull progress with speed and time left."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def text(self, state: "PullStatus", now: float) -> str:
        """One line of progress. now: a monotonic time in seconds."""
        if not state.total:
            return state.status
        return f"{state.status}: {state.completed / state.total:.0%} of {self.detail(state, now)}"

    def detail(self, state: "PullStatus", now: float) -> str:
        """The total size, and speed and time left once they are known."""
        self._seen.append((now, state.completed))
        while self._seen[0][0] < now - WINDOW_S:
            self._seen.popleft()
        size = human_bytes(state.total)
        (began, had), seconds = self._seen[0], now - self._seen[0][0]
        if seconds <= 0 or state.completed <= had:
            return size
        speed = (state.completed - had) / (now - began)
        return f"{size}, {human_bytes(int(speed))}/s, {human_time((state.total - state.completed) / speed)} left"


def find_or_pull(name: str, where: Places, progress: "LoadProgress") -> LibraryModel:
    """Find a model by name, or pull it. Raises LibraryError, and what progress raises; keeps a partial download."""
    try:
        return find(name, where)  # avoids the imports for pulling
    except ModelNotFoundError as error:
        missing = error
    from localllm.library.pull import pull

    meter = PullMeter()

    def report(status: "PullStatus") -> None:
        if status.total:
            progress(f"pulling {name}, {meter.detail(status, monotonic())}", status.completed / status.total)
        else:
            progress(f"asking for {name}", 0.0)

    try:
        return pull(name, where, report)
    except LibraryError as error:
        raise missing.cannot_be_pulled(error) from error


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model of the library, and the settings to load it with: its own, overridden by the user's."""

    entry: LibraryModel
    behaviour: Behaviour
    settings: Settings

    @classmethod
    def of(cls, entry: LibraryModel, settings_with: Callable[[Mapping[str, object]], Settings]) -> Self:
        """settings_with: maps a model's own settings to those settings overridden by the user's."""
        behaviour = behaviour_of(entry)
        return cls(entry, behaviour, settings_with(behaviour.settings))

    def load(self, name: str, progress: "LoadProgress") -> LocalModel:
        """Load it, to answer under this name; its `loaded` is to be closed. Raises what load_model raises."""
        loaded = load_model(self.entry.path, self.settings, progress, self.behaviour.template)
        # The manifest's parameters are already in the settings, where the user can change them.
        return LocalModel(name, loaded, replace(self.behaviour, settings={}))


def usual_model(remote: str | None) -> str:
    """The model that the chat used last; remote servers have none. Raises RequestError if unknown."""
    import sqlite3

    path = sessions_path()
    if os.path.isfile(path) and not remote:
        with (
            contextlib.suppress(sqlite3.Error),  # only a default; the chat itself reports errors in its file
            contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as db,
        ):
            for (name,) in db.execute("SELECT value FROM remembered WHERE name = 'model'"):
                return str(name)
    raise RequestError("Choose a model with --model NAME. `localllm list` shows those on this machine.")
