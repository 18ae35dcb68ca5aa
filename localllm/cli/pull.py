"""localllm pull and push, and pulling on behalf of other commands."""

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from localllm.cli.terminal import ExitCode, StatusLine, note
from localllm.text import human_bytes, human_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from localllm.library.entry import LibraryModel
    from localllm.library.pull import PullProgress, PullStatus
    from localllm.settings import Settings

ResultT = TypeVar("ResultT")

# The speed is an average over these last seconds, so that a stall shows.
WINDOW_S = 5.0


def pull(
    name: Annotated[str, typer.Argument(help="qwen3:0.6b, hf.co/user/repo:Q4_K_M, or a URL.", show_default=False)],
) -> None:
    """Download a model. From Ollama's registry, Hugging Face or any URL.

    An interrupted pull is resumed. Every file is verified against its SHA-256.
    """
    from localllm.library.pull import pull as pull_model
    from localllm.settings import load_settings

    settings = load_settings({})
    model = with_progress(name, lambda progress: pull_model(name, settings, progress))
    note(f'{model.name} is here. Try: localllm run {model.name} "Hello"')


def push(
    name: Annotated[
        str, typer.Argument(help="A model in localllm's store, such as host/user/name.", show_default=False)
    ],
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS, also to another machine.")] = False,
) -> None:
    """Upload a stored model to a registry that speaks Ollama's protocol. Its name begins with the registry's host.

    `localllm cp` gives a model such a name. An interrupted push does not send again what has arrived whole.
    """
    from localllm.library.lookup import stored_name
    from localllm.library.push import push as push_model
    from localllm.settings import load_settings

    model, settings = stored_name(name), load_settings({})
    with_progress(name, lambda progress: push_model(model, settings, progress, insecure), "push")
    note(f"{model} is at {model.host}.")


def obtain(name: str, settings: "Settings") -> "LibraryModel":
    """Find a model by name, or pull it if it is not on this machine. Raises LibraryError."""
    from localllm.library.errors import ModelNotFoundError
    from localllm.library.lookup import find

    try:
        return find(name, settings)  # avoids the imports for pulling
    except ModelNotFoundError:
        from localllm.library.pull import find_or_pull

        return with_progress(name, lambda progress: find_or_pull(name, settings, progress))


def with_progress(name: str, work: "Callable[[PullProgress], ResultT]", command: str = "pull") -> "ResultT":
    """Pull or push and show progress on terminals. Ctrl-C ends the command, which resumes what it left."""
    meter = Meter()
    with StatusLine() as status:
        try:
            return work(lambda state: status.show(meter.text(state, monotonic())))
        except KeyboardInterrupt:
            status.clear()
            note(f"Stopped. `localllm {command} {name}` resumes it.")
            raise typer.Exit(ExitCode.INTERRUPTED) from None


class Meter:
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
